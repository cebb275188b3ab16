{{/*
A pod of a service. Arguments: root, component (router, engine, detok, gateway), pool (name of the engine pool, or ""), spec
(values of the service), model, settings (its rendered settings file), file (the key of this file in the ConfigMap), command,
env, ports, volumes, mounts, resources, startupSeconds, probed (false for processes without a port: ranks above 0). The
gateway has no model, ring port or keys.
*/}}

{{- define "sluice.podTemplate" -}}
{{- $root := .root -}}
{{- $spec := .spec -}}
metadata:
  labels:
    {{- include "sluice.labels" . | nindent 4 }}
    {{- if .probed }}
    sluice.dev/ring: "true"
    {{- end }}
    {{- with $spec.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    checksum/config: {{ .settings | sha256sum }}
    {{- with $spec.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ include "sluice.serviceAccountName" $root }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ add (default 0 $spec.preStopSeconds) $spec.drainSeconds 15 }}
  securityContext:
    {{- include "sluice.podSecurity" $spec | nindent 4 }}
  {{- with $root.Values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $spec.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with $spec.schedulerName }}
  schedulerName: {{ . }}
  {{- end }}
  {{- with $spec.resourceClaims }}
  resourceClaims:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $spec.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with $spec.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $spec.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $spec.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if $spec.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- $selector := dict "labelSelector" (dict "matchLabels" (include "sluice.selector" . | fromYaml)) }}
    {{- range $spec.topologySpreadConstraints }}
    - {{- merge dict . $selector | toYaml | nindent 6 }}
    {{- end }}
  {{- end }}
  {{- $copies := and (ne .component "gateway") (eq (default dict .model).source "s3") }}
  {{- $keeper := (default dict $spec.keeper).enabled }}
  {{- if or $copies $keeper $spec.initContainers }}
  initContainers:
    {{- if $copies }}
    {{- include "sluice.modelFromS3" . | nindent 4 }}
    {{- end }}
    {{- if $keeper }}
    {{- include "sluice.keeper" . | nindent 4 }}
    {{- end }}
    {{- with $spec.initContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
  containers:
    - name: {{ .component }}
      image: {{ include "sluice.image" . }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      command:
        {{- toYaml .command | nindent 8 }}
      env:
        {{- include "sluice.podEnv" . | nindent 8 }}
      {{- with $spec.envFrom }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- if .probed }}
      ports:
        {{- toYaml .ports | nindent 8 }}
      {{- include "sluice.probes" . | nindent 6 }}
      {{- end }}
      {{- with .resources }}
      resources:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- if $spec.preStopSeconds }}
      lifecycle:
        # Endpoints are removed during this sleep, so that new calls go to other pods before the drain begins.
        preStop: {sleep: {seconds: {{ $spec.preStopSeconds }}}}
      {{- end }}
      securityContext:
        {{- include "sluice.containerSecurity" $spec | nindent 8 }}
      volumeMounts:
        {{- include "sluice.mounts" . | nindent 8 }}
    {{- with $spec.sidecars }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
    {{- include "sluice.volumes" . | nindent 4 }}
{{- end -}}

{{- define "sluice.podSecurity" -}}
{{/* The pod's security context. Argument: values of the service. The owner of every file in a large model cache is not
changed at each start. */ -}}
{{- $own := dict
  "runAsNonRoot" true "runAsUser" 10001 "runAsGroup" 10001 "fsGroup" 10001 "fsGroupChangePolicy" "OnRootMismatch"
  "seccompProfile" (dict "type" "RuntimeDefault") -}}
{{- include "sluice.overridden" (list $own .podSecurityContext) -}}
{{- end -}}

{{- define "sluice.containerSecurity" -}}
{{- $own := dict
  "allowPrivilegeEscalation" false "readOnlyRootFilesystem" true "capabilities" (dict "drop" (list "ALL")) -}}
{{- include "sluice.overridden" (list $own .securityContext) -}}
{{- end -}}

{{- define "sluice.overridden" -}}
{{/* Fields of an object, overridden by those of the second; null removes a field, which some platforms set themselves. */ -}}
{{- $merged := index . 0 -}}
{{- range $name, $value := index . 1 -}}
{{- if kindIs "invalid" $value }}{{- $merged = omit $merged $name -}}{{- else }}{{- $merged = set $merged $name $value -}}{{- end -}}
{{- end -}}
{{- toYaml $merged -}}
{{- end -}}

{{- define "sluice.modelFromS3" -}}
{{/* Copies the checkpoint from a bucket to the volume of models. Only engines need the weights. */ -}}
{{- $s3 := .model.s3 -}}
- name: model
  image: {{ $s3.image }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  command:
    - aws
    - s3
    - sync
    - {{ list (required "model.s3.uri is required with model.source: s3" $s3.uri | trimSuffix "/") .model.path | compact | join "/" | quote }}
    - {{ list "/models" .model.path | compact | join "/" | quote }}
    - --no-progress
    {{- if ne .component "engine" }}
    - --exclude=*.safetensors
    - --exclude=*.bin
    - --exclude=*.gguf
    {{- end }}
    {{- with $s3.endpoint }}
    - --endpoint-url={{ . }}
    {{- end }}
    {{- with $s3.region }}
    - --region={{ . }}
    {{- end }}
  env:
    - {name: HOME, value: /tmp}
  {{- with $s3.credentialsSecret }}
  envFrom:
    - secretRef: {name: {{ . }}}
  {{- end }}
  {{- with $s3.resources }}
  resources:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    {{- include "sluice.containerSecurity" .spec | nindent 4 }}
  volumeMounts:
    - {name: models, mountPath: /models}
    - {name: tmp, mountPath: /tmp}
{{- end -}}

{{- define "sluice.podHost" -}}
{{/* The pod's own address in a URL. */ -}}
{{- ternary "[$(POD_IP)]" "$(POD_IP)" (eq .Values.ring.ipFamily "IPv6") -}}
{{- end -}}

{{- define "sluice.podEnv" -}}
{{- $prefix := printf "SLUICE_%s" (upper .component) -}}
- {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
- {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
- {name: {{ $prefix }}_CONFIG, value: /etc/sluice/config/{{ .file }}}
- {name: {{ $prefix }}_ID, value: $(POD_NAME)}
{{- if ne .component "gateway" }}
- name: {{ $prefix }}_LISTEN
  value: tcp://{{ include "sluice.podHost" .root }}:{{ .root.Values.ring.port }}
{{- end }}
- {name: HOME, value: /tmp}
{{- if ne .component "gateway" }}
- {name: HF_HOME, value: {{ ternary "/var/cache/huggingface" "/tmp/huggingface" (eq .model.source "hub") }}}
{{- if and (eq .model.source "hub") .model.hub.tokenSecret }}
- {name: HF_TOKEN_PATH, value: /etc/sluice/hub/{{ .model.hub.tokenKey }}}
{{- end }}
{{- end }}
{{- with .env }}
{{ toYaml . }}
{{- end }}
{{- with .spec.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "sluice.probes" -}}
{{- $port := default "metrics" .probedPort -}}
{{- $inFront := has .component (list "router" "gateway") -}}
startupProbe:
  httpGet: {path: /livez, port: {{ $port }}}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ max 6 (ceil (divf .startupSeconds 5)) }}
readinessProbe:
  httpGet: {path: /readyz, port: {{ $port }}}
  periodSeconds: {{ ternary 2 5 $inFront }}
  timeoutSeconds: 5
livenessProbe:
  httpGet: {path: /livez, port: {{ $port }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
{{- end -}}

{{- define "sluice.mounts" -}}
- {name: config, mountPath: /etc/sluice/config, readOnly: true}
- {name: tmp, mountPath: /tmp}
{{- if ne .component "gateway" }}
{{- if .root.Values.ring.keys.enabled }}
# Mount folders, never a subPath: rotated keys must reach a running pod.
- {name: key, mountPath: /etc/sluice/keys/secret, readOnly: true}
- {name: public-keys, mountPath: /etc/sluice/keys/public, readOnly: true}
{{- end }}
{{- if eq .model.source "hub" }}
- {name: models, mountPath: /var/cache/huggingface}
{{- if .model.hub.tokenSecret }}
- {name: hub-token, mountPath: /etc/sluice/hub, readOnly: true}
{{- end }}
{{- else }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- end }}
{{- with .mounts }}
{{ toYaml . }}
{{- end }}
{{- with .spec.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "sluice.volumes" -}}
{{- $root := .root -}}
- name: config
  configMap: {name: {{ include "sluice.fullname" $root }}}
- name: tmp
  emptyDir: {sizeLimit: {{ .spec.tmpSize }}}
{{- if ne .component "gateway" }}
{{- if $root.Values.ring.keys.enabled }}
- name: key
  secret:
    secretName: {{ include "sluice.keySecret" (dict "root" $root "role" .component) }}
    defaultMode: 0440
    items: [{key: {{ .component }}.key, path: {{ .component }}.key}]
- name: public-keys
  secret:
    secretName: {{ include "sluice.keySecret" (dict "root" $root "role" "public") }}
{{- end }}
- name: models
{{- if eq .model.source "pvc" }}
  persistentVolumeClaim: {claimName: {{ required "model.pvc is required with model.source: pvc" .model.pvc }}, readOnly: true}
{{- else if eq .model.source "image" }}
  image: {reference: {{ required "model.image is required with model.source: image" .model.image }}}
{{- else if eq .model.source "hostPath" }}
  hostPath: {path: {{ required "model.hostPath is required with model.source: hostPath" .model.hostPath }}, type: Directory}
{{- else if and (eq .model.source "hub") .model.hub.cachePvc }}
  persistentVolumeClaim: {claimName: {{ .model.hub.cachePvc }}}
{{- else }}
  emptyDir: {}
{{- end }}
{{- if and (eq .model.source "hub") .model.hub.tokenSecret }}
- name: hub-token
  secret: {secretName: {{ .model.hub.tokenSecret }}, defaultMode: 0440}
{{- end }}
{{- end }}
{{- with .volumes }}
{{ toYaml . }}
{{- end }}
{{- with .spec.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}
