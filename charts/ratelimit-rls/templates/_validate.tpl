{{/*
Rejects invalid combinations of values. All errors are reported at once, each with what would be right; what one value
alone may be is in values.schema.json.
*/}}

{{/* Settings that have a value of their own, which other objects depend on, too. */}}
{{- define "ratelimit-rls.settingsWithValue" -}}
PORT: ports.http
GRPC_PORT: ports.grpc
GRPC_UDS: mode=sidecar and sidecar.socketDirectory
DEBUG_PORT: ports.debug
RLS_RULES: descriptors
RUNTIME_ROOT: descriptors
RUNTIME_SUBDIRECTORY: descriptors
RUNTIME_APPDIRECTORY: descriptors
RLS_RUNTIME_DIR: nothing (it is a volume of the chart's)
RLS_REPLICAS: replicaCount or autoscaling.maxReplicas
RLS_DRAIN_DELAY: drain.delaySeconds or sidecar.drainDelaySeconds
RLS_DRAIN_TIMEOUT: drain.timeoutSeconds
USE_PROMETHEUS: metrics.enabled
PROMETHEUS_ADDR: ports.metrics
PROMETHEUS_PATH: metrics.path
REDIS_URL: redis.url
REDIS_AUTH: redis.auth.existingSecret
REDIS_AUTH_FILE: redis.auth.existingSecret
REDIS_SENTINEL_AUTH: extraEnv with secretKeyRef
REDIS_PERSECOND_AUTH: extraVolumes and settings.REDIS_PERSECOND_AUTH_FILE
REDIS_PERSECOND_SENTINEL_AUTH: extraEnv with secretKeyRef
REDIS_TLS: redis.tls.enabled
REDIS_TLS_CACERT: redis.tls.existingSecret
REDIS_TLS_CLIENT_CERT: redis.tls.existingSecret and redis.tls.certKey
REDIS_TLS_CLIENT_KEY: redis.tls.existingSecret and redis.tls.keyKey
RLS_DATABASE_URL: database.existingSecret
RLS_KEY_SECRET: database.existingSecret
RLS_ADMIN_TOKEN: database.existingSecret.adminTokenKey
RLS_SNAPSHOT_FILE: nothing (it is a volume of the chart's)
RLS_JWT_ISSUERS: identity.jwtIssuers
RLS_ADMIN_HOST: admin.enabled
RLS_ADMIN_PORT: ports.admin
GRPC_SERVER_USE_TLS: tls.enabled
GRPC_SERVER_TLS_CERT: tls.existingSecret
GRPC_SERVER_TLS_KEY: tls.existingSecret
GRPC_CLIENT_TLS_CACERT: tls.clientCa
GRPC_SERVER_TLS_CA_CERT: tls.clientCa
GRPC_SERVER_TLS_CRL: tls.crl
RLS_HTTP_TLS: tls.http
RLS_HTTP_TOKEN: extraEnv with secretKeyRef
RLS_HTTP_UDS: ports.http (probes need a port)
{{- end -}}

{{/* Settings that the chart reads, so that it must see them. */}}
{{- define "ratelimit-rls.settingsOfChart" -}}
{{- list "CONFIG_TYPE" "RLS_WORKERS" "RLS_OTLP_METRICS" "TRACING_ENABLED" "USE_STATSD" "USE_DOG_STATSD" "RLS_ADMIN_AUTH" "RLS_ARCHIVE" | toJson -}}
{{- end -}}

{{- define "ratelimit-rls.validate" -}}
{{- $wrong := list -}}
{{- $sidecar := eq .Values.mode "sidecar" -}}
{{- $redis := include "ratelimit-rls.hasRedis" . -}}
{{- $database := include "ratelimit-rls.hasDatabase" . -}}
{{- $workers := include "ratelimit-rls.setting" (list . "RLS_WORKERS") | default "1" | int -}}

{{- if not (has .Values.mode (list "deployment" "sidecar")) -}}
{{- $wrong = append $wrong (printf "mode: %q must be deployment or sidecar" .Values.mode) -}}
{{- end -}}

{{- $labels := dict "commonLabels" .Values.commonLabels "podLabels" .Values.podLabels "metrics.serviceMonitor.labels" .Values.metrics.serviceMonitor.labels "metrics.alerts.prometheusRule.labels" .Values.metrics.alerts.prometheusRule.labels "metrics.alerts.configMap.labels" .Values.metrics.alerts.configMap.labels "metrics.dashboards.labels" .Values.metrics.dashboards.labels -}}
{{- range $value, $given := $labels -}}
{{- range $key, $_ := $given -}}
{{- if has $key (include "ratelimit-rls.reservedLabels" $ | fromJsonArray) -}}
{{- $wrong = append $wrong (printf "%s: %s is set by the chart and used by its selectors; use another key" $value $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- if and .Values.descriptors.inline .Values.descriptors.existingConfigMap -}}
{{- $wrong = append $wrong "descriptors: inline and existingConfigMap exclude each other; set one of them" -}}
{{- end -}}
{{- if and (not (include "ratelimit-rls.rulesFromFiles" .)) (or .Values.descriptors.inline .Values.descriptors.existingConfigMap) -}}
{{- $wrong = append $wrong "descriptors: with settings.CONFIG_TYPE=GRPC_XDS_SOTW the rules come from the xDS server; set one or the other" -}}
{{- end -}}

{{- range $name, $rules := .Values.descriptors.inline -}}
{{- range include "ratelimit-rls.nonStrings" (list (printf "descriptors.inline.%s" $name) $rules) | splitList "\n" | compact -}}
{{- $wrong = append $wrong (printf "%s after YAML parsing; quote it, or pass the file as a string" .) -}}
{{- end -}}
{{- end -}}

{{- $owned := include "ratelimit-rls.settingsWithValue" . | fromYaml -}}
{{- range $name, $value := default dict .Values.settings -}}
{{- if hasKey $owned $name -}}
{{- $wrong = append $wrong (printf "settings.%s: use %s" $name (get $owned $name)) -}}
{{- end -}}
{{- end -}}
{{- $set := merge (include "ratelimit-rls.derived" . | fromYaml) (default dict .Values.settings) -}}
{{- if .Values.database.tls.existingSecret -}}
{{- range list "PGSSLMODE" "PGSSLROOTCERT" -}}
{{- $_ := set $owned . "database.tls.existingSecret" -}}
{{- end -}}
{{- end -}}
{{- $seen := dict -}}
{{- range .Values.extraEnv -}}
{{- $instead := get $owned .name -}}
{{- if hasKey $seen .name -}}
{{- $wrong = append $wrong (printf "extraEnv: %s is set twice" .name) -}}
{{- else if hasKey $set .name -}}
{{- $wrong = append $wrong (printf "extraEnv: %s is set by %s already; a variable can be given once" .name (default "settings" $instead)) -}}
{{- else if and $instead (not (hasPrefix "extraEnv" $instead)) -}}
{{- $wrong = append $wrong (printf "extraEnv: %s: use %s" .name $instead) -}}
{{- else if or (has .name (include "ratelimit-rls.settingsOfChart" $ | fromJsonArray)) (and (eq .name "REDIS_PERSECOND_URL") (hasKey . "value")) -}}
{{- $wrong = append $wrong (printf "extraEnv: %s: use settings.%s, which the chart reads" .name .name) -}}
{{- end -}}
{{- $_ := set $seen .name true -}}
{{- end -}}

{{- if .Values.metrics.enabled -}}
{{- range $name := list "USE_STATSD" "USE_DOG_STATSD" -}}
{{- if include "ratelimit-rls.isOn" (list $ $name) -}}
{{- $wrong = append $wrong (printf "settings.%s: only one sink is possible, and metrics.enabled=true selects Prometheus; set metrics.enabled=false to use this one" $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- if gt (len (compact (list .Values.redis.url .Values.redis.existingSecret.name (.Values.redis.deploy.enabled | ternary "deploy" "")))) 1 -}}
{{- $wrong = append $wrong "redis: url, existingSecret and deploy.enabled exclude each other; set one of them" -}}
{{- end -}}
{{- if and (or .Values.redis.auth.existingSecret .Values.redis.tls.enabled) (not .Values.redis.url) (not .Values.redis.existingSecret.name) -}}
{{- $wrong = append $wrong "redis: auth and tls need redis.url or redis.existingSecret" -}}
{{- end -}}
{{- if and .Values.redis.tls.existingSecret (not .Values.redis.tls.enabled) -}}
{{- $wrong = append $wrong "redis.tls.existingSecret: has no effect without redis.tls.enabled=true" -}}
{{- end -}}
{{- if ne (empty .Values.redis.tls.certKey) (empty .Values.redis.tls.keyKey) -}}
{{- $wrong = append $wrong "redis.tls: certKey and keyKey must be set together" -}}
{{- end -}}
{{- if and .Values.redis.tls.certKey (not .Values.redis.tls.existingSecret) -}}
{{- $wrong = append $wrong "redis.tls.certKey: needs redis.tls.existingSecret" -}}
{{- end -}}
{{- if and (not $sidecar) (not $redis) (gt (include "ratelimit-rls.maxReplicas" . | int) 1) -}}
{{- $wrong = append $wrong "replicaCount, autoscaling: more than one pod needs redis.url (or redis.existingSecret or redis.deploy.enabled); without Redis each would admit the whole limit" -}}
{{- end -}}
{{- if and (not $redis) (gt $workers 1) -}}
{{- $wrong = append $wrong "settings.RLS_WORKERS: more than one needs redis.url; without Redis each would admit the whole limit" -}}
{{- end -}}

{{- if not $database -}}
{{- range $name, $given := dict "admin.enabled" .Values.admin.enabled "database.existingSecret.adminTokenKey" .Values.database.existingSecret.adminTokenKey "database.tls.existingSecret" .Values.database.tls.existingSecret -}}
{{- if $given -}}
{{- $wrong = append $wrong (printf "%s: has no effect without a database; set database.existingSecret.name" $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and (or .Values.admin.enabled $sidecar) (eq (include "ratelimit-rls.setting" (list . "RLS_ADMIN_AUTH")) "none") -}}
{{- $wrong = append $wrong (printf "settings.RLS_ADMIN_AUTH: none is only allowed on loopback, which %s; remove it to use tokens" ($sidecar | ternary "all containers of a sidecar's pod share" "admin.enabled leaves")) -}}
{{- end -}}
{{- range $index, $issuer := .Values.identity.jwtIssuers -}}
{{- range $name, $file := dict "jwks.file" (default dict $issuer.jwks).file "secret_file" $issuer.secret_file -}}
{{- if and $file (not (hasPrefix "/" $file)) -}}
{{- $wrong = append $wrong (printf "identity.jwtIssuers[%d].%s: %s is a relative path; mount the file with extraVolumes, and use its absolute path" $index $name $file) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- if and .Values.tls.enabled (not .Values.tls.existingSecret) -}}
{{- $wrong = append $wrong "tls.enabled: needs tls.existingSecret, a Secret with certificate and key" -}}
{{- end -}}
{{- if and (or .Values.tls.existingSecret .Values.tls.clientCa.key) (not .Values.tls.enabled) -}}
{{- $wrong = append $wrong "tls: existingSecret and clientCa have no effect without tls.enabled=true" -}}
{{- end -}}
{{- if and .Values.tls.http (not .Values.tls.enabled) -}}
{{- $wrong = append $wrong "tls.http: has no effect without tls.enabled=true" -}}
{{- end -}}
{{- if and .Values.tls.clientCa.existingSecret (not .Values.tls.clientCa.key) -}}
{{- $wrong = append $wrong "tls.clientCa.existingSecret: needs tls.clientCa.key, such as ca.crt" -}}
{{- end -}}
{{- if and .Values.tls.crl.existingSecret (not .Values.tls.crl.key) -}}
{{- $wrong = append $wrong "tls.crl.existingSecret: needs tls.crl.key, such as crl.pem" -}}
{{- end -}}
{{- if and .Values.tls.crl.key (not .Values.tls.clientCa.key) -}}
{{- $wrong = append $wrong "tls.crl.key: needs tls.clientCa.key, the CA whose certificates the lists revoke" -}}
{{- end -}}

{{- $ports := dict -}}
{{- $unused := compact (list ($sidecar | ternary "grpc" "") (empty $database | ternary "admin" "")) -}}
{{- range $name, $port := .Values.ports -}}
{{- if not (has $name $unused) -}}
{{- if hasKey $ports (toString $port) -}}
{{- $wrong = append $wrong (printf "ports: %s and %s are both %v; every port must be different" (get $ports (toString $port)) $name $port) -}}
{{- end -}}
{{- $_ := set $ports (toString $port) $name -}}
{{- end -}}
{{- end -}}

{{- if .Values.autoscaling.enabled -}}
{{- if gt (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas) -}}
{{- $wrong = append $wrong "autoscaling: minReplicas must be ≤ maxReplicas" -}}
{{- end -}}
{{- if not (or .Values.autoscaling.targetCPUUtilizationPercentage .Values.autoscaling.metrics) -}}
{{- $wrong = append $wrong "autoscaling: needs targetCPUUtilizationPercentage or metrics" -}}
{{- end -}}
{{- end -}}
{{- $least := include "ratelimit-rls.minReplicas" . | int -}}
{{- if and .Values.podDisruptionBudget.enabled (not $sidecar) (gt $least 1) -}}
{{- $minAvailable := include "ratelimit-rls.text" .Values.podDisruptionBudget.minAvailable -}}
{{- if not (or $minAvailable (include "ratelimit-rls.text" .Values.podDisruptionBudget.maxUnavailable)) -}}
{{- $wrong = append $wrong "podDisruptionBudget: needs maxUnavailable or minAvailable, or enabled=false" -}}
{{- end -}}
{{- if or (eq $minAvailable "100%") (and (regexMatch "^[0-9]+$" $minAvailable) (ge (int $minAvailable) $least)) -}}
{{- $wrong = append $wrong (printf "podDisruptionBudget.minAvailable: with %s of %d pods no node could ever be drained; use %d or less" $minAvailable $least (sub $least 1)) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.networkPolicy.enabled .Values.networkPolicy.restrictEgress (not $sidecar) -}}
{{- $open := list -}}
{{- range .Values.networkPolicy.redisPorts -}}
{{- $open = append $open (include "ratelimit-rls.text" .) -}}
{{- end -}}
{{- range $from, $url := dict "redis.url" .Values.redis.url "settings.REDIS_PERSECOND_URL" (include "ratelimit-rls.setting" (list . "REDIS_PERSECOND_URL")) -}}
{{- range include "ratelimit-rls.redisPorts" $url | fromJsonArray -}}
{{- if not (has . $open) -}}
{{- $wrong = append $wrong (printf "networkPolicy.redisPorts: lacks %s, which %s names, so Redis would be unreachable; add it" . $from) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and (include "ratelimit-rls.externalRedis" .) (not $open) -}}
{{- $wrong = append $wrong "networkPolicy.redisPorts: is empty, so Redis would be unreachable" -}}
{{- end -}}
{{- if and $database (not .Values.networkPolicy.databasePorts) -}}
{{- $wrong = append $wrong "networkPolicy.databasePorts: is empty, so the database would be unreachable" -}}
{{- end -}}
{{- if not .Values.networkPolicy.extraEgress -}}
{{- $outward := dict "settings.CONFIG_TYPE=GRPC_XDS_SOTW" (not (include "ratelimit-rls.rulesFromFiles" .)) "settings.RLS_OTLP_METRICS" (include "ratelimit-rls.setting" (list . "RLS_OTLP_METRICS")) "settings.TRACING_ENABLED" (include "ratelimit-rls.isOn" (list . "TRACING_ENABLED")) "settings.USE_STATSD" (include "ratelimit-rls.isOn" (list . "USE_STATSD")) "settings.USE_DOG_STATSD" (include "ratelimit-rls.isOn" (list . "USE_DOG_STATSD")) "settings.RLS_ARCHIVE" (contains "://" (include "ratelimit-rls.setting" (list . "RLS_ARCHIVE"))) -}}
{{- range $index, $issuer := .Values.identity.jwtIssuers -}}
{{- $_ := set $outward (printf "identity.jwtIssuers[%d].jwks.url" $index) (default dict $issuer.jwks).url -}}
{{- end -}}
{{- range $what, $on := $outward -}}
{{- if $on -}}
{{- $wrong = append $wrong (printf "networkPolicy.extraEgress: %s needs egress, but only DNS, Redis and the database are allowed; add a rule" $what) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if not .Values.metrics.enabled -}}
{{- range $name, $on := dict "serviceMonitor" .Values.metrics.serviceMonitor.enabled "alerts.prometheusRule" .Values.metrics.alerts.prometheusRule.enabled "alerts.configMap" .Values.metrics.alerts.configMap.enabled -}}
{{- if $on -}}
{{- $wrong = append $wrong (printf "metrics.%s.enabled: needs metrics.enabled=true" $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- $drain := add .Values.drain.delaySeconds .Values.drain.timeoutSeconds -}}
{{- if and (not $sidecar) (lt (int .Values.terminationGracePeriodSeconds) (int $drain)) -}}
{{- $wrong = append $wrong (printf "terminationGracePeriodSeconds: %d is less than drain.delaySeconds + drain.timeoutSeconds, so calls in flight could be cut off; use %d or more" (int .Values.terminationGracePeriodSeconds) $drain) -}}
{{- end -}}

{{- if $sidecar -}}
{{- range $name, $on := dict "autoscaling.enabled" .Values.autoscaling.enabled "networkPolicy.restrictEgress" .Values.networkPolicy.restrictEgress "admin.enabled" .Values.admin.enabled "metrics.serviceMonitor.enabled" .Values.metrics.serviceMonitor.enabled "service.headless" .Values.service.headless -}}
{{- if $on -}}
{{- $wrong = append $wrong (printf "%s: has no effect in sidecar mode, whose pods belong to another chart" $name) -}}
{{- end -}}
{{- end -}}
{{- if .Values.tls.enabled -}}
{{- $wrong = append $wrong "tls.enabled: TLS is not supported on a Unix socket; remove it in sidecar mode" -}}
{{- end -}}
{{- if gt $workers 1 -}}
{{- $wrong = append $wrong "settings.RLS_WORKERS: a Unix socket cannot be shared by several processes; use 1 in sidecar mode" -}}
{{- end -}}
{{- if and .Values.sidecar.native (semverCompare "<1.29.0-0" .Capabilities.KubeVersion.Version) -}}
{{- $wrong = append $wrong (printf "sidecar.native: needs Kubernetes 1.29 or later, this is %s; use sidecar.native=false" .Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- if and (not .Values.sidecar.native) .Values.sidecar.example.enabled (lt (int .Values.sidecar.drainDelaySeconds) (int .Values.sidecar.example.drainSeconds)) -}}
{{- $wrong = append $wrong "sidecar: drainDelaySeconds is less than example.drainSeconds, so Envoy would outlive its limiter" -}}
{{- end -}}
{{- if has (trimSuffix "/" .Values.sidecar.socketDirectory) (list "/run/rls" "/etc/ratelimit-rls" "/tmp" "") -}}
{{- $wrong = append $wrong (printf "sidecar.socketDirectory: %s is not suitable; use a separate directory, e.g. /run/ratelimit-rls" .Values.sidecar.socketDirectory) -}}
{{- end -}}
{{- end -}}

{{- if ne (empty .Values.helmTest.domain) (empty .Values.helmTest.descriptor) -}}
{{- $wrong = append $wrong "helmTest: domain and descriptor must be set together" -}}
{{- end -}}

{{- if $wrong -}}
{{- fail (printf "\n\nInvalid values:\n  - %s\n" (join "\n  - " $wrong)) -}}
{{- end -}}
{{- end -}}
