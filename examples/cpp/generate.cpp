// generate [PROMPT]: streams a completion to stdout. SLUICE_ADDRESS names the router.
#include <cstdlib>
#include <iostream>
#include <memory>
#include <string>

#include <grpcpp/grpcpp.h>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "sluice/v1/generation.grpc.pb.h"

// The server's error code, such as OVERLOADED; empty if the error did not come from the server.
std::string reason_of(const grpc::Status& status) {
  google::rpc::Status details;
  details.ParseFromString(status.error_details());
  for (const auto& detail : details.details()) {
    google::rpc::ErrorInfo info;
    if (detail.UnpackTo(&info)) return info.reason();
  }
  return "";
}

int main(int count, char** arguments) {
  const char* address = std::getenv("SLUICE_ADDRESS");
  auto channel = grpc::CreateChannel(address ? address : "127.0.0.1:50051", grpc::InsecureChannelCredentials());
  auto stub = sluice::v1::GenerationService::NewStub(channel);

  sluice::v1::GenerateStreamRequest request;
  auto* spec = request.mutable_spec();
  spec->set_text(count > 1 ? arguments[1] : "def fibonacci(n):");
  spec->mutable_sampling()->set_temperature(0);
  spec->mutable_stopping()->set_max_tokens(32);

  grpc::ClientContext context;
  auto stream = stub->GenerateStream(&context, request);
  sluice::v1::GenerateStreamResponse event;
  while (stream->Read(&event)) {
    if (event.has_delta()) std::cout << event.delta().text() << std::flush;
  }
  std::cout << std::endl;
  // After the last read, Finish returns the status of the call.
  const grpc::Status status = stream->Finish();
  if (status.ok()) return 0;
  std::cerr << reason_of(status) << ": " << status.error_message() << std::endl;
  return 1;
}
