// java Generate [PROMPT]: streams a completion to stdout. SLUICE_ADDRESS names the router.

import com.google.protobuf.Any;
import com.google.rpc.ErrorInfo;
import com.google.rpc.Status;
import io.grpc.ManagedChannel;
import io.grpc.Metadata;
import io.grpc.StatusRuntimeException;
import io.grpc.netty.NettyChannelBuilder;
import io.grpc.protobuf.ProtoUtils;
import io.sluice.v1.GenerateStreamRequest;
import io.sluice.v1.GenerateStreamResponse;
import io.sluice.v1.GenerationServiceGrpc;
import io.sluice.v1.GenerationSpec;
import io.sluice.v1.SamplingParams;
import io.sluice.v1.StoppingCriteria;
import java.util.Iterator;

public final class Generate {
  private static final Metadata.Key<Status> DETAILS =
      Metadata.Key.of("grpc-status-details-bin", ProtoUtils.metadataMarshaller(Status.getDefaultInstance()));

  public static void main(String[] arguments) throws Exception {
    String address = System.getenv().getOrDefault("SLUICE_ADDRESS", "127.0.0.1:50051");
    GenerationSpec spec =
        GenerationSpec.newBuilder()
            .setText(arguments.length > 0 ? arguments[0] : "def fibonacci(n):")
            .setSampling(SamplingParams.newBuilder().setTemperature(0))
            .setStopping(StoppingCriteria.newBuilder().setMaxTokens(32))
            .build();
    ManagedChannel channel = NettyChannelBuilder.forTarget(address).usePlaintext().build();
    try {
      Iterator<GenerateStreamResponse> events =
          GenerationServiceGrpc.newBlockingStub(channel)
              .generateStream(GenerateStreamRequest.newBuilder().setSpec(spec).build());
      while (events.hasNext()) {
        GenerateStreamResponse event = events.next();
        if (event.hasDelta()) {
          System.out.print(event.getDelta().getText());
          System.out.flush();
        }
      }
      System.out.println();
    } catch (StatusRuntimeException error) {
      System.err.println(reason(error) + ": " + error.getStatus().getDescription());
      System.exit(1);
    } finally {
      channel.shutdownNow();
    }
  }

  /** The server's error code, such as OVERLOADED; empty if the error did not come from the server. */
  private static String reason(StatusRuntimeException error) throws Exception {
    Status details = error.getTrailers() == null ? null : error.getTrailers().get(DETAILS);
    for (Any detail : details == null ? Status.getDefaultInstance().getDetailsList() : details.getDetailsList()) {
      if (detail.is(ErrorInfo.class)) {
        return detail.unpack(ErrorInfo.class).getReason();
      }
    }
    return "";
  }
}
