{{/* Names and labels. `.` is always this chart's own scope: a parent passes `index .Subcharts "ratelimit-rls"`. */}}

{{- define "ratelimit-rls.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{/* Short enough that the longest ending ("-sidecar-example") still makes a DNS label. */}}
{{- define "ratelimit-rls.fullname" -}}
{{- $name := include "ratelimit-rls.name" . -}}
{{- $full := contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) -}}
{{- default $full .Values.fullnameOverride | trunc 47 | trimSuffix "-" -}}
{{- end -}}

{{/* Pods have these and no version: a label that changes with every release would restart them for nothing. */}}
{{- define "ratelimit-rls.selectorLabels" -}}
app.kubernetes.io/name: {{ include "ratelimit-rls.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "ratelimit-rls.limiterLabels" -}}
{{ include "ratelimit-rls.selectorLabels" . }}
app.kubernetes.io/component: limiter
{{- end -}}

{{/* What no label in the values may be called: selectors go by some, and a key cannot be written twice. */}}
{{- define "ratelimit-rls.reservedLabels" -}}
{{- list "helm.sh/chart" "app.kubernetes.io/name" "app.kubernetes.io/instance" "app.kubernetes.io/component" "app.kubernetes.io/version" "app.kubernetes.io/managed-by" | toJson -}}
{{- end -}}

{{- define "ratelimit-rls.labels" -}}
{{ include "ratelimit-rls.labelsAnd" (list . dict) }}
{{- end -}}

{{/* With the labels of one object, which win over those of all. */}}
{{- define "ratelimit-rls.labelsAnd" -}}
{{- $more := index . 1 -}}
{{- with index . 0 -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{ include "ratelimit-rls.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- with merge dict (default dict $more) (default dict .Values.commonLabels) }}
{{ toYaml . }}
{{- end }}
{{- end -}}
{{- end -}}

{{- define "ratelimit-rls.serviceAccountName" -}}
{{- $made := .Values.serviceAccount.create | ternary (include "ratelimit-rls.fullname" .) "default" -}}
{{- default $made .Values.serviceAccount.name -}}
{{- end -}}

{{- define "ratelimit-rls.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end -}}
{{- end -}}

{{/* A setting of `settings` as its variable has it; empty if it is not given. */}}
{{- define "ratelimit-rls.setting" -}}
{{- $settings := default dict (index . 0).Values.settings -}}
{{- if hasKey $settings (index . 1) -}}
{{- include "ratelimit-rls.text" (get $settings (index . 1)) -}}
{{- end -}}
{{- end -}}

{{/* Not empty if a setting says yes, in any of Go's words. */}}
{{- define "ratelimit-rls.isOn" -}}
{{- if has (include "ratelimit-rls.setting" .) (list "1" "t" "T" "TRUE" "true" "True") -}}true{{- end -}}
{{- end -}}

{{/* Not empty if the rules come from files; with xDS they do not. */}}
{{- define "ratelimit-rls.rulesFromFiles" -}}
{{- if ne (include "ratelimit-rls.setting" (list . "CONFIG_TYPE")) "GRPC_XDS_SOTW" -}}true{{- end -}}
{{- end -}}

{{/* Not empty if nobody gave rules, so that the example's are served. */}}
{{- define "ratelimit-rls.exampleRules" -}}
{{- if and (include "ratelimit-rls.rulesFromFiles" .) (not .Values.descriptors.inline) (not .Values.descriptors.existingConfigMap) -}}true{{- end -}}
{{- end -}}

{{- define "ratelimit-rls.rulesConfigMap" -}}
{{- default (printf "%s-descriptors" (include "ratelimit-rls.fullname" .)) .Values.descriptors.existingConfigMap -}}
{{- end -}}

{{- define "ratelimit-rls.redisName" -}}
{{ include "ratelimit-rls.fullname" . }}-redis
{{- end -}}

{{- define "ratelimit-rls.redisUrl" -}}
{{- if .Values.redis.deploy.enabled -}}
{{ include "ratelimit-rls.redisName" . }}:6379
{{- else -}}
{{ .Values.redis.url }}
{{- end -}}
{{- end -}}

{{/* Not empty if counters are in Redis, also if its address is known to a Secret only. */}}
{{- define "ratelimit-rls.hasRedis" -}}
{{- if or (include "ratelimit-rls.redisUrl" .) .Values.redis.existingSecret.name -}}true{{- end -}}
{{- end -}}

{{/* Not empty if there is a Redis that is not this chart's. */}}
{{- define "ratelimit-rls.otherRedis" -}}
{{- if or .Values.redis.url .Values.redis.existingSecret.name (include "ratelimit-rls.setting" (list . "REDIS_PERSECOND_URL")) -}}true{{- end -}}
{{- end -}}

{{/*
The ports in an address of Redis, as JSON. Of what has no scheme, only host:port names one: the rest is the name of a
master, a socket, or for the service to refuse.
*/}}
{{- define "ratelimit-rls.redisPorts" -}}
{{- $ports := list -}}
{{- range splitList "," . -}}
{{- $address := regexReplaceAll "[/?].*$" (regexReplaceAll "^(rediss?|unix)://" (trim .) "") "" -}}
{{- $port := regexFind ":[0-9]+$" $address | trimPrefix ":" -}}
{{- if $port -}}
{{- $ports = append $ports $port -}}
{{- else if regexMatch "^rediss?://" (trim .) -}}
{{- $ports = append $ports "6379" -}}
{{- end -}}
{{- end -}}
{{- $ports | uniq | toJson -}}
{{- end -}}

{{/* Not empty if there is a database, whose address only its Secret knows. */}}
{{- define "ratelimit-rls.hasDatabase" -}}
{{- if .Values.database.existingSecret.name -}}true{{- end -}}
{{- end -}}

{{/*
Named after what is in it: the service reads issuers once, so that other ones must be another ConfigMap, for pods to start
anew with it, in charts that include the templates, too.
*/}}
{{- define "ratelimit-rls.issuersConfigMap" -}}
{{ include "ratelimit-rls.fullname" . }}-issuers-{{ .Values.identity.jwtIssuers | toJson | sha256sum | trunc 8 }}
{{- end -}}

{{/* How many pods there can be: what `local` divides limits by. */}}
{{- define "ratelimit-rls.mostReplicas" -}}
{{- .Values.autoscaling.enabled | ternary .Values.autoscaling.maxReplicas .Values.replicaCount | int -}}
{{- end -}}

{{/* How many there are at least: whether a disruption budget makes sense. */}}
{{- define "ratelimit-rls.leastReplicas" -}}
{{- .Values.autoscaling.enabled | ternary .Values.autoscaling.minReplicas .Values.replicaCount | int -}}
{{- end -}}

{{/* A file of alerts whose runbooks are where the documentation is. */}}
{{- define "ratelimit-rls.alertsText" -}}
{{- $place := (index . 0).Values.metrics.alerts.docsUrl -}}
{{- index . 1 | toString | trim | replace "runbook_url: docs/" (printf "runbook_url: %sdocs/" (empty $place | ternary "" (printf "%s/" (trimSuffix "/" $place)))) -}}
{{- end -}}

{{- define "ratelimit-rls.socket" -}}
{{ trimSuffix "/" .Values.sidecar.socketDirectory }}/rls.sock
{{- end -}}

{{/* What a pod of our own (not one of Envoy's) is like, whoever runs in it. */}}
{{- define "ratelimit-rls.ownPod" -}}
automountServiceAccountToken: false
# Variables that Kubernetes makes of Services, such as GRPC_PORT of one called grpc, would be taken for settings.
enableServiceLinks: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
securityContext: {{- toYaml .Values.podSecurityContext | nindent 2 }}
{{- end -}}
