{{/* Combinations of values that the schema cannot refuse. Included by the service's Deployment. */}}
{{- define "makeway.checks" -}}
{{- if and (gt (int (include "makeway.replicas" .)) 1) (not (include "makeway.postgresql" .)) -}}
{{- fail "service.replicas: several replicas share a PostgreSQL; name a Secret with its URL in database.existingSecret, or leave replicas empty." -}}
{{- end -}}
{{- with .Values.policy }}
{{- with get (fromYaml .) "Error" -}}
{{- fail (printf "policy: this is no YAML mapping: %s" .) -}}
{{- end -}}
{{- end -}}
{{- if eq (include "makeway.jobsNamespace" .) .Release.Namespace -}}
{{- fail "jobs.namespace: jobs need a namespace of their own, because the service may create and delete pods there." -}}
{{- end -}}
{{- if eq .Values.mode "addOn" -}}{{ include "makeway.addOnChecks" . }}{{- end -}}
{{- end -}}
