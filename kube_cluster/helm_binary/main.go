// Package main is Helm for the tests of the chart: its own command line, built from its Go modules.
package main

import (
	"errors"
	"fmt"
	"os"

	helm "helm.sh/helm/v4/pkg/cmd"
	_ "k8s.io/client-go/plugin/pkg/client/auth"
)

func main() {
	os.Exit(run())
}

func run() int {
	command, err := helm.NewRootCmd(os.Stdout, os.Args[1:], helm.SetupLogging)
	if err == nil {
		err = command.Execute()
	}
	if err == nil {
		return 0
	}
	fmt.Fprintln(os.Stderr, "Error:", err)
	var failed helm.CommandError
	if errors.As(err, &failed) {
		return failed.ExitCode
	}
	return 1
}
