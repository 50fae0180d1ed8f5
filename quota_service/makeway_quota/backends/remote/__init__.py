"""Run attempts whose workers report by HTTP: what all such backends share."""
