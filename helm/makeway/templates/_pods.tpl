{{/* What all pods of the chart have in common: the restricted pod security standard and more. */}}

{{- define "makeway.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "makeway.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- define "makeway.placement" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* The storage class of a claim: null is the cluster's default, "" is none, for volumes that somebody made. */}}
{{- define "makeway.storageClass" -}}
{{- if not (kindIs "invalid" .storageClass) }}storageClassName: {{ .storageClass | quote }}{{ end -}}
{{- end -}}

{{/* A variable from the chart's Secret: (list $ NAME key). */}}
{{- define "makeway.fromSecret" -}}
- name: {{ index . 1 }}
  valueFrom: {secretKeyRef: {name: {{ include "makeway.secret" (index . 0) | quote }}, key: {{ index . 2 }}}}
{{- end -}}
