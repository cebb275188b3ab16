//go:build debian

package main

import (
	"google.golang.org/grpc/encoding"
	"google.golang.org/protobuf/proto"
)

// Debian's gRPC, from 2020, cannot encode the messages that a current protoc-gen-go generates. Current modules can.
type codec struct{}

func (codec) Name() string { return "proto" }

func (codec) Marshal(message interface{}) ([]byte, error) {
	return proto.Marshal(message.(proto.Message))
}

func (codec) Unmarshal(data []byte, message interface{}) error {
	return proto.Unmarshal(data, message.(proto.Message))
}

func init() { encoding.RegisterCodec(codec{}) }
