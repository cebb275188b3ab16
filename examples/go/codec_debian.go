//go:build debian

package main

import (
	"google.golang.org/grpc/encoding"
	"google.golang.org/protobuf/proto"
)

// Debian's gRPC is of 2020 and cannot encode what today's protoc-gen-go generates. Not needed with current modules.
type codec struct{}

func (codec) Name() string { return "proto" }

func (codec) Marshal(message interface{}) ([]byte, error) {
	return proto.Marshal(message.(proto.Message))
}

func (codec) Unmarshal(data []byte, message interface{}) error {
	return proto.Unmarshal(data, message.(proto.Message))
}

func init() { encoding.RegisterCodec(codec{}) }
