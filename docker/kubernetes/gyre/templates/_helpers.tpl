{{/* The MiB of a size such as 512Mi or 8Gi. */}}
{{- define "gyre.mib" -}}
{{- $number := . | trimSuffix "Mi" | trimSuffix "Gi" | trimSuffix "Ti" | int64 -}}
{{- if hasSuffix "Ti" . -}}{{ mul $number 1048576 }}
{{- else if hasSuffix "Gi" . -}}{{ mul $number 1024 }}
{{- else -}}{{ $number }}
{{- end -}}
{{- end -}}

{{- define "gyre.labels" -}}
app.kubernetes.io/name: gyre
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* Whether the kubelet may make the node's folder: as root's, so that the daemon could not use it alone. */}}
{{- define "gyre.folder" -}}
{{- if eq .Values.node.prepare "node" -}}Directory{{- else -}}DirectoryOrCreate{{- end -}}
{{- end -}}

{{/* The memory that the daemon takes at most, in MiB. */}}
{{- define "gyre.memory" -}}
{{- add (include "gyre.mib" .Values.memory.batches) (include "gyre.mib" .Values.memory.cache) (include "gyre.mib" .Values.memory.daemon) -}}
{{- end -}}

{{/* gyre.toml: what the pod's own fields follow from, and the user's text. */}}
{{- define "gyre.toml" -}}
listen = ["unix:/var/lib/gyre/socket/gyre.sock"]
health_listen = "tcp:0.0.0.0:{{ .Values.healthPort }}"
{{- if .Values.metricsPort }}
metrics_listen = "tcp:0.0.0.0:{{ .Values.metricsPort }}"
metrics_public = true
{{- end }}
memory_budget = "{{ .Values.memory.batches }}B"
cache_memory = "{{ .Values.memory.cache }}B"
{{- if ne (include "gyre.mib" .Values.cacheDisk) "0" }}
cache_dir = "/var/lib/gyre/cache"
cache_disk = "{{ .Values.cacheDisk }}B"
{{- end }}
index_dir = "/var/lib/gyre/index"
num_transform_workers = {{ .Values.cpu }}
drain_timeout_s = {{ .Values.drainTimeoutSeconds }}.0
{{ .Values.config }}
{{- end -}}
