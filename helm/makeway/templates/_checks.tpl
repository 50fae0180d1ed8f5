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
{{- if and .Values.artifacts.existingSecret (not .Values.artifacts.s3) -}}
{{- fail "artifacts.existingSecret: its keys are for object storage, and artifacts.s3 names no bucket; set artifacts.s3: s3://bucket/prefix, or leave the Secret out." -}}
{{- end -}}
{{- if eq (include "makeway.jobsNamespace" .) .Release.Namespace -}}
{{- fail "jobs.namespace: jobs need a namespace of their own, because the service may create and delete pods there." -}}
{{- end -}}
{{ include "makeway.otherReleases" . }}
{{ include "makeway.subdomainChecks" . }}
{{ include "makeway.filesChecks" . }}
{{ include "makeway.immutableChecks" . }}
{{- if eq .Values.mode "addOn" -}}{{ include "makeway.addOnChecks" . }}{{- end -}}
{{- end -}}

{{/* The claim of each home, as KubeSpawner's template. What extraConfig sets is not known here. */}}
{{- define "makeway.homes" -}}
{{- $config := .Values.hub.config | default dict -}}
{{- dig "MakewayKubeSpawner" "pvc_name_template" "" $config | default (dig "KubeSpawner" "pvc_name_template" "" $config) | default "home-{user_server}" -}}
{{- end -}}

{{/* Another Makeway in the namespace: its Hub would mount the same homes. Nothing is found where Helm does not read the cluster. */}}
{{- define "makeway.otherReleases" -}}
{{- $homes := include "makeway.homes" . -}}
{{- $own := $homes | splitList "{" | first -}}
{{- $services := (lookup "apps/v1" "Deployment" .Release.Namespace "").items -}}
{{- /* What is there of this release: homes that it keeps are no new conflict; charts before did not write them down. */}}
{{- $before := dict -}}
{{- range $services -}}
{{- $labels := .metadata.labels | default dict -}}
{{- if and (eq (get $labels "app.kubernetes.io/name") $.Chart.Name) (eq (get $labels "app.kubernetes.io/component") "service") (eq (get $labels "app.kubernetes.io/instance") $.Release.Name) (not (hasKey (.spec.template.metadata.labels | default dict) "hub.jupyter.org/network-access-hub")) -}}
{{- $before = dict "homes" (get (.metadata.annotations | default dict) "makeway/homes") -}}
{{- end -}}
{{- end -}}
{{- $keeps := and (hasKey $before "homes") (has $before.homes (list "" $homes)) -}}
{{- range $services -}}
{{- $labels := .metadata.labels | default dict -}}
{{- $other := get $labels "app.kubernetes.io/instance" -}}
{{- if and (eq (get $labels "app.kubernetes.io/name") $.Chart.Name) (eq (get $labels "app.kubernetes.io/component") "service") (ne $other $.Release.Name) -}}
{{- $addOn := hasKey (.spec.template.metadata.labels | default dict) "hub.jupyter.org/network-access-hub" -}}
{{- if and $addOn (eq $.Values.mode "addOn") -}}
{{- fail (printf "The release %s is the Makeway of the Zero to JupyterHub in the namespace %s, which joins one only. Install this one beside another Zero to JupyterHub, in its namespace." $other $.Release.Namespace) -}}
{{- end -}}
{{- $written := get (.metadata.annotations | default dict) "makeway/homes" -}}
{{- if and (not $addOn) (ne $.Values.mode "addOn") (not $keeps) (or $written (not $.Release.IsUpgrade)) -}}
{{- /* Of two homes with names that begin alike, one may be that of a user of the other: home-a-{user_server} and a user a-ana. */}}
{{- $theirs := $written | default "home-{user_server}" | splitList "{" | first -}}
{{- if or (hasPrefix $own $theirs) (hasPrefix $theirs $own) -}}
{{- $both := printf "The release %s is a Makeway of the namespace %s, too, and both would mount the same homes of users, %sNAME." $other $.Release.Namespace $theirs -}}
{{- if $.Release.IsUpgrade -}}
{{- fail (printf "%s Set hub.config.KubeSpawner.pvc_name_template back first%s: with another one, users of this release would find empty homes." $both (ternary (printf ", to %s" (get $before "homes")) "" (ne (get $before "homes") ""))) -}}
{{- end -}}
{{- $first := ternary "" (printf " If %s has other homes, upgrade it first: it is of a chart that does not write down which." $other) (ne $written "") -}}
{{- fail (printf "%s%s Install this one in another namespace; or give its homes names that begin otherwise, with hub.config.KubeSpawner.pvc_name_template: %s-home-{user_server}" $both $first $.Release.Name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- include "makeway.otherJobs" . -}}
{{- end -}}

{{/* Another Makeway in the jobs' namespace: both would have the same account, volume of checkpoints and policies there. */}}
{{- define "makeway.otherJobs" -}}
{{- $jobs := include "makeway.jobsNamespace" . -}}
{{- with lookup "v1" "ServiceAccount" $jobs "makeway-job" -}}
{{- $theirs := .metadata.annotations | default dict -}}
{{- $other := get $theirs "meta.helm.sh/release-name" -}}
{{- $where := get $theirs "meta.helm.sh/release-namespace" -}}
{{- if and $other (or (ne $other $.Release.Name) (ne $where $.Release.Namespace)) -}}
{{- fail (printf "The jobs of the release %s in %s are in the namespace %s. Two Makeways do not share it: name another one in jobs.namespace, say, %s-%s-jobs." $other $where $jobs $.Release.Namespace $.Release.Name) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Large files that a service would no longer find: those on the volume of the database, and those on their own. */}}
{{- define "makeway.filesChecks" -}}
{{- $service := printf "%s-service" (include "makeway.name" .) -}}
{{- $files := printf "%s-files" (include "makeway.name" .) -}}
{{- $hasService := lookup "v1" "PersistentVolumeClaim" .Release.Namespace $service -}}
{{- $hasFiles := lookup "v1" "PersistentVolumeClaim" .Release.Namespace $files -}}
{{- if and (include "makeway.filesVolume" .) $hasService (not $hasFiles) -}}
{{- fail (printf "artifacts.storage: the large files of submissions are on the claim %s, with the database, and the service would no longer find them. Leave them there with artifacts.storage.size: \"\", or move them to a claim %s first (docs/how-to/back-up-and-upgrade.md, Large files on a volume of their own)." $service $files) -}}
{{- end -}}
{{- if and $hasFiles (not (include "makeway.filesVolume" .)) (not (include "makeway.postgresql" .)) (not .Values.artifacts.s3) -}}
{{- fail (printf "artifacts.storage.size: the large files of submissions are on the claim %s, and the service would no longer find them. Set the size again; or, if none are needed any more, delete the claim first." $files) -}}
{{- end -}}
{{- end -}}

{{/* Names of users' servers: the Hub checks the host itself. */}}
{{- define "makeway.subdomainChecks" -}}
{{- if and (eq .Values.mode "standalone") (include "makeway.subdomainHost" .) -}}
{{- $host := include "makeway.subdomainHost" . -}}
{{- $name := include "makeway.subdomainName" . -}}
{{- if ne (dig "JupyterHub" "subdomain_hook" "idna" .Values.hub.config | toString) "idna" -}}
{{- fail "hub.config.JupyterHub.subdomain_hook: the chart knows the names of the default, idna, only; leave it out." -}}
{{- end -}}
{{- with .Values.proxy.ingress -}}
{{- if and .enabled (ne .host $name) -}}
{{- fail (printf "proxy.ingress.host: with hub.config.JupyterHub.subdomain_host: %s it is %s, and the chart adds *.%s to it; here it is %q." $host $name $name .host) -}}
{{- end -}}
{{- if and .enabled .tlsSecret (hasPrefix "http://" $host) -}}
{{- fail (printf "hub.config.JupyterHub.subdomain_host: browsers reach an ingress with tlsSecret by https: write %s." ($host | replace "http://" "https://")) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* What Kubernetes would refuse to change in the middle of an upgrade. Nothing is found where Helm does not read the cluster. */}}
{{- define "makeway.immutableChecks" -}}
{{- if .Values.priorityClasses.create -}}
{{- range $kind := list "portal" "guaranteed" "preemptible" -}}
{{- $name := include "makeway.ownPriorityClass" (list $ $kind) -}}
{{- $given := include "makeway.priorityValue" (list $ $kind) | int64 -}}
{{- with lookup "scheduling.k8s.io/v1" "PriorityClass" "" $name -}}
{{- if ne (int64 .value) $given -}}
{{- fail (printf "priorityClasses.%s: Kubernetes does not change the value of a priority class, here from %d to %d. Delete it first, kubectl delete priorityclass %s, and upgrade at once: pods that run keep their priority, and no pod of this class can be made until then." $kind (int64 .value) $given $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $claim := lookup "v1" "PersistentVolumeClaim" (include "makeway.jobsNamespace" .) "makeway-checkpoints" -}}
{{- $modes := .Values.jobs.checkpoints.accessModes | sortAlpha | join ", " -}}
{{- if and $claim (not .Values.jobs.checkpoints.existingClaim) -}}
{{- $before := $claim.spec.accessModes | sortAlpha | join ", " -}}
{{- if ne $before $modes -}}
{{- fail (printf "jobs.checkpoints.accessModes: Kubernetes does not change those of a claim, here from %s to %s. Make another claim in %s, copy the checkpoints while no job runs, and name it in jobs.checkpoints.existingClaim." $before $modes (include "makeway.jobsNamespace" .)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
