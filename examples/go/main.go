// go run . [PROMPT]: streams a completion to stdout. SLUICE_ADDRESS names the router.
package main

import (
	"context"
	"fmt"
	"io"
	"os"

	sluicev1 "github.com/sluice-serve/sluice/gen/go/sluice/v1"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
)

func main() {
	address, prompt := os.Getenv("SLUICE_ADDRESS"), "def fibonacci(n):"
	if address == "" {
		address = "127.0.0.1:50051"
	}
	if len(os.Args) > 1 {
		prompt = os.Args[1]
	}
	if err := generate(address, prompt); err != nil {
		fmt.Fprintf(os.Stderr, "%s: %s\n", reason(err), status.Convert(err).Message())
		os.Exit(1)
	}
}

func generate(address, prompt string) error {
	connection, err := grpc.Dial(address, grpc.WithInsecure())
	if err != nil {
		return err
	}
	defer connection.Close()
	// Optional fields are pointers: an explicit 0 differs from unset.
	temperature, tokens := float32(0), uint32(32)
	spec := &sluicev1.GenerationSpec{
		Prompt:   &sluicev1.GenerationSpec_Text{Text: prompt},
		Sampling: &sluicev1.SamplingParams{Temperature: &temperature},
		Stopping: &sluicev1.StoppingCriteria{MaxTokens: &tokens},
	}
	client := sluicev1.NewGenerationServiceClient(connection)
	// Cancelling the context stops a stream that is not read to its end.
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	stream, err := client.GenerateStream(ctx, &sluicev1.GenerateStreamRequest{Spec: spec})
	if err != nil {
		return err
	}
	for {
		event, err := stream.Recv()
		if err == io.EOF {
			fmt.Println()
			return nil
		}
		if err != nil {
			return err
		}
		fmt.Print(event.GetDelta().GetText())
	}
}

// reason returns the server's error code, such as OVERLOADED; empty if the error did not come from the server.
func reason(err error) string {
	for _, detail := range status.Convert(err).Details() {
		if info, ok := detail.(*errdetails.ErrorInfo); ok {
			return info.Reason
		}
	}
	return ""
}
