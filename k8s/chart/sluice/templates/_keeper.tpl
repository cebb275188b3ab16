{{/* The keeper of an engine: a sidecar that hands the blocks in the engine's pool file to engines of other pods. */}}

{{- define "sluice.checkKeeper" -}}
{{/* Fails if there is no pool file to hand out. Argument: the engine's settings. */ -}}
{{- if gt (.tensor_parallel | int) 1 -}}
{{- fail (printf "engine.keeper.enabled requires engines of one rank: blocks of tensor_parallel %d are in no file" (.tensor_parallel | int)) -}}
{{- end -}}
{{- if and (ne .device "cpu") (not .kv_host_memory) -}}
{{- fail "engine.keeper.enabled requires engine.settings.kv_host_memory on GPUs: the file has the blocks in host memory" -}}
{{- end -}}
{{- if not (hasPrefix "/dev/shm/" .kv_folder) -}}
{{- fail (printf "engine.keeper.enabled requires engine.settings.kv_folder below /dev/shm (got %s)" .kv_folder) -}}
{{- end -}}
{{- if eq (toString .kv_fetch) "false" -}}
{{- fail "engine.keeper.enabled requires engine.settings.kv_fetch: an engine that copies no blocks has no use for it" -}}
{{- end -}}
{{- end -}}

{{- define "sluice.keeperAddress" -}}
{{/* The same for the keeper and for engines of other pods. Arguments: root, spec. */ -}}
tcp://{{ include "sluice.podHost" .root }}:{{ .spec.keeper.port }}
{{- end -}}

{{- define "sluice.keepers" -}}
{{/* The values of the pools' keepers that are enabled, as JSON: {"keepers": [...]}. */ -}}
{{- $keepers := list -}}
{{- range (include "sluice.pools" . | fromJson).pools -}}
{{- if .spec.keeper.enabled }}{{- $keepers = append $keepers .spec.keeper -}}{{- end -}}
{{- end -}}
{{- dict "keepers" $keepers | toJson -}}
{{- end -}}

{{- define "sluice.keeper" -}}
{{/* The container. It starts before the engine and ends after it. Arguments: those of the engine's pod. */ -}}
{{- $keeper := .spec.keeper -}}
- name: keeper
  restartPolicy: Always
  image: {{ include "sluice.image" . }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  command: [python, -m, engine_worker.keeper]
  env:
    {{- include "sluice.keeperEnv" . | nindent 4 }}
  ports:
    - {name: keeper, containerPort: {{ $keeper.port }}}
    - {name: keeper-metrics, containerPort: {{ $keeper.metricsPort }}}
  {{- include "sluice.probes" (dict "component" "keeper" "probedPort" "keeper-metrics" "startupSeconds" 300) | nindent 2 }}
  resources:
    {{- include "sluice.keeperResources" $keeper | nindent 4 }}
  securityContext:
    {{- include "sluice.containerSecurity" .spec | nindent 4 }}
  volumeMounts:
    - {name: shm, mountPath: /dev/shm}
    {{- if .root.Values.ring.keys.enabled }}
    - {name: key, mountPath: /etc/sluice/keys/secret, readOnly: true}
    - {name: public-keys, mountPath: /etc/sluice/keys/public, readOnly: true}
    {{- end }}
    {{- if ne $keeper.disk.kind "none" }}
    - {name: keeper-disk, mountPath: /var/cache/sluice}
    {{- end }}
{{- end -}}

{{- define "sluice.keeperEnv" -}}
{{- $values := .root.Values -}}
{{- $keeper := .spec.keeper -}}
- {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
- {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
- {name: SLUICE_KEEPER_ID, value: $(POD_NAME)}
- {name: SLUICE_KEEPER_LISTEN, value: {{ include "sluice.keeperAddress" . | quote }}}
- {name: SLUICE_KEEPER_KV_FOLDER, value: {{ (fromYaml .settings).kv_folder | quote }}}
{{- if $values.ring.keys.enabled }}
- {name: SLUICE_KEEPER_KEYS, value: /etc/sluice/keys}
{{- else }}
- {name: SLUICE_KEEPER_INSECURE_RING, value: "true"}
{{- end }}
- {name: SLUICE_KEEPER_LOG_LEVEL, value: {{ $values.logLevel }}}
- {name: SLUICE_KEEPER_METRICS_HOST, value: {{ include "sluice.anyInterface" .root | quote }}}
- {name: SLUICE_KEEPER_METRICS_PORT, value: {{ $keeper.metricsPort | quote }}}
{{- if ne $keeper.disk.kind "none" }}
# A folder in the volume: the volume's root is not closed to others.
- {name: SLUICE_KEEPER_DISK_FOLDER, value: /var/cache/sluice/blocks}
- {name: SLUICE_KEEPER_DISK_BYTES, value: {{ include "sluice.keeperDiskBytes" $keeper.disk | quote }}}
{{- end }}
- {name: HOME, value: /tmp}
{{- with $keeper.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "sluice.keeperDiskBytes" -}}
{{/* Nine tenths of the volume: a file system needs room, and so do blocks that are being written or deleted. */ -}}
{{- $units := dict "M" 1e6 "G" 1e9 "T" 1e12 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- $number := regexFind "^[0-9.]+" .size -}}
{{- mulf 0.9 (float64 $number) (get $units (trimPrefix $number .size) | float64) | int64 -}}
{{- end -}}

{{- define "sluice.keeperResources" -}}
{{/* An emptyDir is part of the node's ephemeral storage. Argument: values of the keeper. */ -}}
{{- $resources := deepCopy .resources -}}
{{- if eq .disk.kind "emptyDir" -}}
{{- $resources = mustMergeOverwrite (dict "requests" (dict "ephemeral-storage" .disk.size)) $resources -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{- define "sluice.keeperDisk" -}}
{{/* The volume of the blocks on disk, which ends with the pod. Argument: its values. */ -}}
name: keeper-disk
{{- if eq .kind "emptyDir" }}
emptyDir: {sizeLimit: {{ .size }}}
{{- else }}
ephemeral:
  volumeClaimTemplate:
    spec:
      accessModes: [ReadWriteOnce]
      {{- with .storageClassName }}
      storageClassName: {{ . }}
      {{- end }}
      resources: {requests: {storage: {{ .size }}}}
{{- end }}
{{- end -}}
