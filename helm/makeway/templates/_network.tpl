{{/* Rules that several network policies share. */}}

{{- define "makeway.dns" -}}
- to:
    - namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: kube-system}}
    {{- with .Values.networkPolicy.dns }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  ports:
    {{- range .Values.networkPolicy.dnsPorts | default (list 53) }}
    - {port: {{ . | int64 }}, protocol: UDP}
    - {port: {{ . | int64 }}, protocol: TCP}
    {{- end }}
{{- end -}}

{{- define "makeway.ipFamilies" -}}{{ with .Values.ipFamilyPolicy }}ipFamilyPolicy: {{ . }}{{ end }}{{- end -}}

{{- define "makeway.internet" -}}
{{- if .Values.networkPolicy.internet }}
{{- $four := list }}{{ $six := list }}
{{- range .Values.networkPolicy.blocked }}{{ if contains ":" . }}{{ $six = append $six . }}{{ else }}{{ $four = append $four . }}{{ end }}{{ end }}
- to:
    - ipBlock: {cidr: 0.0.0.0/0, except: {{ toJson $four }}}
    {{- with $six }}
    - ipBlock: {cidr: "::/0", except: {{ toJson . }}}
    {{- end }}
{{- end }}
{{- end -}}

{{/* Without addresses, a rule is for all: Cilium counts no node as part of an address block, not even of 0.0.0.0/0. */}}
{{- define "makeway.apiServer" -}}
- ports:
    {{- range .Values.networkPolicy.apiServer.ports }}
    - {port: {{ . | int64 }}, protocol: TCP}
    {{- end }}
  {{- with .Values.networkPolicy.apiServer.cidr }}
  to:
    - ipBlock: {cidr: {{ . | quote }}}
  {{- end }}
{{- end -}}

{{/* Rules of the values: (list $ pods). */}}
{{- define "makeway.extraEgress" -}}
{{- with dig "extraEgress" (index . 1) list (index . 0).Values.networkPolicy }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The pods of one component in the release's namespace: (list $ component). In mode addOn, Zero to JupyterHub's. */}}
{{- define "makeway.peer" -}}
{{- $root := index . 0 }}{{ $component := index . 1 -}}
{{- if and (eq $root.Values.mode "addOn") (ne $component "service") -}}
podSelector: {matchLabels: {app: {{ $root.Values.zeroToJupyterHub.app }}, component: {{ $component }}}}
{{- else -}}
podSelector: {matchLabels: {app.kubernetes.io/name: {{ $root.Chart.Name }}, app.kubernetes.io/instance: {{ $root.Release.Name | quote }}, app.kubernetes.io/component: {{ $component }}}}
{{- end -}}
{{- end -}}

{{/* The port of object storage: that of AWS_ENDPOINT_URL_S3 in service.extraEnv, else Amazon's. */}}
{{- define "makeway.storagePort" -}}
{{- $port := "443" -}}
{{- range .Values.service.extraEnv -}}
{{- if and (eq .name "AWS_ENDPOINT_URL_S3") .value -}}
{{- $url := urlParse .value -}}
{{- $port = regexFind "[0-9]+$" (regexFind ":[0-9]+$" $url.host) | default (ternary "80" "443" (eq $url.scheme "http")) -}}
{{- end -}}
{{- end -}}
{{ $port }}
{{- end -}}
