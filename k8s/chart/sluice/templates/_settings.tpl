{{/* The services' settings files: settings that the chart sets, overridden by each service's `settings`. */}}

{{- define "sluice.anyInterface" -}}
{{- ternary "::" "0.0.0.0" (eq .Values.ring.ipFamily "IPv6") -}}
{{- end -}}

{{- define "sluice.commonSettings" -}}
{{/* Settings that all services share, as JSON. Arguments: root, spec, model. */ -}}
{{- $values := .root.Values -}}
{{- $common := dict
  "model" (ternary .model.path (printf "/models/%s" (trimPrefix "/" .model.path) | trimSuffix "/") (eq .model.source "hub"))
  "log_level" $values.logLevel
  "metrics_host" (include "sluice.anyInterface" .root)
  "metrics_port" ($values.metrics.port | int)
  "drain_timeout" (.spec.drainSeconds | int) -}}
{{- with .model.servedName }}{{- $_ := set $common "name" . -}}{{- end -}}
{{- with .model.revision }}{{- $_ := set $common "revision" . -}}{{- end -}}
{{- if $values.ring.keys.enabled -}}
{{- $_ := set $common "keys" "/etc/sluice/keys" -}}
{{- else -}}
{{- $_ := set $common "insecure_ring" true -}}
{{- end -}}
{{- $common | toJson -}}
{{- end -}}

{{- define "sluice.routerSettings" -}}
{{- $router := .Values.router -}}
{{- if and $router.tls.clientCa (not $router.tls.secretName) -}}
{{- fail "router.tls.clientCa requires router.tls.secretName: clients present certificates only over TLS" -}}
{{- end -}}
{{- if and $router.admin.enabled (not (or $router.admin.tokensSecret $router.tokens.secretName $router.settings.auth)) -}}
{{- fail "router.admin.enabled requires tokens: set router.admin.tokensSecret or router.tokens.secretName" -}}
{{- end -}}
{{- $own := include "sluice.commonSettings" (dict "root" . "spec" $router "model" .Values.model) | fromJson -}}
{{- $peer := printf "dns://%s-%%s.%s.svc.%s:%d" (include "sluice.fullname" .) .Release.Namespace .Values.clusterDomain (.Values.ring.port | int) -}}
{{- $any := include "sluice.anyInterface" . -}}
{{- $_ := mustMergeOverwrite $own (dict "host" $any "port" ($router.port | int) "engines" (list (printf $peer "engine")) "detokenizers" (list (printf $peer "detok"))) -}}
{{- if $router.tls.secretName -}}
{{- $_ := mustMergeOverwrite $own (dict "tls_certificate" "/etc/sluice/tls/tls.crt" "tls_key" "/etc/sluice/tls/tls.key") -}}
{{- if $router.tls.clientCa }}{{- $_ := set $own "tls_client_ca" "/etc/sluice/client-ca/ca.crt" -}}{{- end -}}
{{- else -}}
{{- $_ := set $own "insecure" true -}}
{{- end -}}
{{- if $router.chatTemplate }}{{- $_ := set $own "chat_template" "/etc/sluice/config/chat_template.jinja" -}}{{- end -}}
{{- if $router.tokens.secretName }}{{- $_ := set $own "tokens_file" (printf "/etc/sluice/tokens/%s" $router.tokens.secretKey) -}}{{- end -}}
{{- if $router.admin.enabled -}}
{{- $_ := mustMergeOverwrite $own (dict "admin_host" $any "admin_port" ($router.admin.port | int)) -}}
{{- if $router.admin.tokensSecret }}{{- $_ := set $own "admin_tokens_file" (printf "/etc/sluice/admin-tokens/%s" $router.admin.tokensKey) -}}{{- end -}}
{{- end -}}
{{- mustMergeOverwrite $own (deepCopy $router.settings) | toYaml -}}
{{- end -}}

{{- define "sluice.engineSettings" -}}
{{/* Arguments: root, pool. */ -}}
{{- $spec := .pool.spec -}}
{{- $gpus := $spec.gpu.count | int -}}
{{- $own := include "sluice.commonSettings" (dict "root" .root "spec" $spec "model" .pool.model) | fromJson -}}
{{- $_ := mustMergeOverwrite $own (dict
  "model_version" (ternary .pool.name "" (eq $spec.phase "both"))
  "device" (ternary "cuda" "cpu" (gt $gpus 0))
  "tensor_parallel" (mul (max 1 $gpus) ($spec.multiNode.size | int) | int)) -}}
{{- if ne $spec.phase "both" }}{{- $_ := set $own "phase" $spec.phase -}}{{- end -}}
{{- $merged := mustMergeOverwrite $own (deepCopy $spec.settings) -}}
{{/* The file outlives the container, so that a restarted one takes it over. On a GPU it needs kv_host_memory, and the
chart chooses it only for a keeper. */ -}}
{{- $hasFile := and (eq ($merged.tensor_parallel | int) 1) (or (eq $merged.device "cpu") $spec.keeper.enabled) -}}
{{- if and $hasFile (not $merged.kv_folder) -}}
{{- $_ := set $merged "kv_folder" "/dev/shm/sluice" -}}
{{- end -}}
{{- if $spec.keeper.enabled }}{{- include "sluice.checkKeeper" $merged -}}{{- end -}}
{{- $merged | toYaml -}}
{{- end -}}

{{- define "sluice.detokSettings" -}}
{{- $own := include "sluice.commonSettings" (dict "root" . "spec" .Values.detok "model" .Values.model) | fromJson -}}
{{- mustMergeOverwrite $own (deepCopy .Values.detok.settings) | toYaml -}}
{{- end -}}

{{- define "sluice.gatewaySettings" -}}
{{- $gateway := .Values.gatewayHttp -}}
{{- $own := dict
  "log_level" .Values.logLevel
  "metrics_host" (include "sluice.anyInterface" .)
  "metrics_port" (.Values.metrics.port | int)
  "drain_timeout" ($gateway.drainSeconds | int)
  "host" (include "sluice.anyInterface" .)
  "port" ($gateway.port | int)
  "routers" (list (printf "dns:///%s-router.%s.svc.%s:%d" (include "sluice.fullname" .) .Release.Namespace .Values.clusterDomain (.Values.router.port | int))) -}}
{{- if $gateway.tls.secretName -}}
{{- $_ := mustMergeOverwrite $own (dict "tls_certificate" "/etc/sluice/tls/tls.crt" "tls_key" "/etc/sluice/tls/tls.key") -}}
{{- else -}}
{{- $_ := set $own "insecure" true -}}
{{- end -}}
{{- if .Values.router.tls.secretName -}}
{{- $_ := required "gatewayHttp.routerCa is required with router.tls: the gateway verifies the routers' certificate with it" $gateway.routerCa -}}
{{- $_ := set $own "router_ca" "/etc/sluice/router-ca/ca.crt" -}}
{{- end -}}
{{- mustMergeOverwrite $own (deepCopy $gateway.settings) | toYaml -}}
{{- end -}}
