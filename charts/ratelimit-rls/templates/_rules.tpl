{{/* Inspection of inline rules: values changed by YAML parsing, and a descriptor for the test pod. */}}

{{/*
Strings of a mapping that YAML has parsed as another type, one per line. The original text (007, on, 1.10) cannot be
recovered from the parsed value (7, true, 1.1), so it is rejected.
*/}}
{{- define "ratelimit-rls.nonStrings" -}}
{{- $path := index . 0 -}}
{{- $node := index . 1 -}}
{{- if kindIs "map" $node -}}
{{- range $key, $value := $node -}}
{{- $own := printf "%s.%s" $path $key -}}
{{- if or (kindIs "map" $value) (kindIs "slice" $value) -}}
{{- include "ratelimit-rls.nonStrings" (list $own $value) -}}
{{- else if and (has $key (list "domain" "key" "value" "name" "cidr" "prefix" "regex")) (not (kindIs "string" $value)) (not (kindIs "invalid" $value)) -}}
{{ printf "%s is not text but %s" $own (include "ratelimit-rls.text" $value) }}
{{ end -}}
{{- end -}}
{{- else if kindIs "slice" $node -}}
{{- range $index, $value := $node -}}
{{- include "ratelimit-rls.nonStrings" (list (printf "%s[%d]" $path $index) $value) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/*
Request of the test pod, as JSON {domain, entries}: the first descriptor of `descriptors.inline` that certainly has a
limit. Empty if there is none, or if the rules are outside the chart.
*/}}
{{- define "ratelimit-rls.requestFromRules" -}}
{{- $found := dict -}}
{{- if include "ratelimit-rls.exampleRules" . -}}
{{- $found = dict "domain" "demo" "entries" (list "user=helm-test") -}}
{{- else -}}
{{- range $file, $rules := .Values.descriptors.inline -}}
{{- $read := kindIs "string" $rules | ternary ($rules | toString | fromYaml) $rules -}}
{{- if and (not $found) (kindIs "string" $read.domain) (kindIs "slice" $read.descriptors) -}}
{{- $entries := include "ratelimit-rls.entriesWithLimit" $read.descriptors | fromJsonArray -}}
{{- if $entries -}}
{{- $found = dict "domain" $read.domain "entries" $entries -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if $found -}}{{- toJson $found -}}{{- end -}}
{{- end -}}

{{/* The entries key=value that lead to the first limit on or below a level, as JSON; [] if there is none. */}}
{{- define "ratelimit-rls.entriesWithLimit" -}}
{{- $found := list -}}
{{- $patterns := false -}}
{{- $level := list -}}
{{- range . -}}
{{- if kindIs "map" . -}}
{{- $level = append $level . -}}
{{- end -}}
{{- end -}}
{{- range $level -}}
{{- if or (hasKey . "match") (contains "*" (toString .key)) (contains "*" (toString .value)) -}}
{{- $patterns = true -}}
{{- end -}}
{{- end -}}
{{- range $level -}}
{{- /* A generated value might match a sibling pattern, which is not evaluated here. */ -}}
{{- $usable := and (kindIs "string" .key) (not (hasKey . "match")) (kindIs "string" (default "" .value)) (or .value (not $patterns)) -}}
{{- $switchedOff := or (eq (toString .action) "allow") (and (hasKey . "enabled") (not .enabled)) -}}
{{- if and (not $found) $usable (not $switchedOff) -}}
{{- $entry := printf "%s=%v" .key (default "helm-test" .value) -}}
{{- $limited := false -}}
{{- range prepend (kindIs "slice" .limits | ternary .limits list) .rate_limit -}}
{{- if kindIs "map" . -}}
{{- $limited = or $limited (not .unlimited) -}}
{{- end -}}
{{- end -}}
{{- if $limited -}}
{{- $found = list $entry -}}
{{- else if kindIs "slice" .descriptors -}}
{{- $below := include "ratelimit-rls.entriesWithLimit" .descriptors | fromJsonArray -}}
{{- if $below -}}
{{- $found = prepend $below $entry -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toJson $found -}}
{{- end -}}
