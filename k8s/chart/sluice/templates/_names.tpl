{{/* Names and labels. */}}

{{- define "sluice.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "sluice.selector" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- with .pool }}
sluice.dev/pool: {{ . }}
{{- end }}
{{- end -}}

{{- define "sluice.labels" -}}
{{ include "sluice.selector" . }}
app.kubernetes.io/part-of: sluice
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "sluice.metadata" -}}
{{/* Metadata of an object. Arguments: root, component, name; annotations and labels of the values, if any. */ -}}
name: {{ .name }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "sluice.labels" (omit . "pool") | nindent 2 }}
  {{- with .labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with merge dict (default dict .annotations) .root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "sluice.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "sluice.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "sluice.image" -}}
{{/* Image of a service: its own `image` overrides the common one. A digest is valid for one repository only, so a service
with a repository of its own does not inherit it. */ -}}
{{- $common := .root.Values.image -}}
{{- $own := default dict .spec.image -}}
{{- $image := mustMergeOverwrite (ternary (omit $common "digest") (deepCopy $common) (hasKey $own "repository")) $own -}}
{{- with $image.registry }}{{ . }}/{{ end -}}
{{- $image.repository -}}
{{- if $image.digest -}}@{{ $image.digest }}{{- else -}}:{{ default .root.Chart.AppVersion $image.tag }}{{- end -}}
{{- end -}}

{{- define "sluice.keySecret" -}}
{{/* Name of the Secret with the ring key of a role, or with the public keys. */ -}}
{{- default (printf "%s-key-%s" (include "sluice.fullname" .root) .role) (index .root.Values.ring.keys.secrets .role) -}}
{{- end -}}

{{- define "sluice.pools" -}}
{{/* The pools of engines as JSON: {"pools": [{name, object, spec, model}]}; a pool is merged over `engine`. */ -}}
{{- $pools := list -}}
{{- $full := include "sluice.fullname" . -}}
{{- range (default (list dict) .Values.engines) -}}
{{- $spec := mustMergeOverwrite (deepCopy $.Values.engine) (omit (deepCopy .) "name" "model") -}}
{{- $model := mustMergeOverwrite (deepCopy $.Values.model) (default dict .model) -}}
{{/* A LeaderWorkerSet's controller creates a Service with the set's name, so the set must not be named FULLNAME-engine. */ -}}
{{- $unnamed := ternary (printf "%s-engine-group" $full) (printf "%s-engine" $full) (gt ($spec.multiNode.size | int) 1) -}}
{{- $object := ternary (printf "%s-engine-%s" $full .name) $unnamed (hasKey . "name") -}}
{{- $pools = append $pools (dict "name" (default "" .name) "object" $object "spec" $spec "model" $model) -}}
{{- end -}}
{{- dict "pools" $pools | toJson -}}
{{- end -}}
