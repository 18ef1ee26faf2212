// Lists the objects of a master over gRPC: node grpc_list_objects.mjs HOST:PORT [PREFIX]
//
// Needs no packages: gRPC is HTTP/2, which node has, and the two messages are short. A larger program
// uses @grpc/grpc-js with crates/proto/proto/mooncake/v1/master.proto.
import http2 from "node:http2";

const [address, prefix = ""] = process.argv.slice(2);
if (!address) {
  console.error("usage: node grpc_list_objects.mjs HOST:PORT [PREFIX]");
  process.exit(2);
}

// Protobuf: a field of bytes is its tag, its length, and the bytes.
function varint(value) {
  const bytes = [];
  for (; value > 127; value = Math.floor(value / 128)) bytes.push((value % 128) | 128);
  return Buffer.from([...bytes, value]);
}
function field(number, bytes) {
  return Buffer.concat([varint(number * 8 + 2), varint(bytes.length), bytes]);
}
function* fields(buffer) {
  let at = 0;
  const number = () => {
    let value = 0, scale = 1, byte;
    do {
      byte = buffer[at++];
      value += (byte & 127) * scale;
      scale *= 128;
    } while (byte & 128);
    return value;
  };
  while (at < buffer.length) {
    const tag = number();
    if (tag % 8 === 0) yield [tag >> 3, number()];
    else if (tag % 8 === 2) {
      const length = number();
      yield [tag >> 3, buffer.subarray(at, (at += length))];
    } else throw new Error(`wire type ${tag % 8} is not expected`);
  }
}

// A call: five bytes (not compressed, length), then the message.
function call(session, method, message) {
  return new Promise((resolve, reject) => {
    const head = Buffer.alloc(5);
    head.writeUInt32BE(message.length, 1);
    const stream = session.request({
      ":method": "POST",
      ":path": `/mooncake.v1.Master/${method}`,
      "content-type": "application/grpc",
      te: "trailers",
      ...(process.env.MOONCAKE_MASTER_TOKEN && {
        authorization: `Bearer ${process.env.MOONCAKE_MASTER_TOKEN}`,
      }),
    });
    const chunks = [];
    let status, text;
    const readStatus = (headers) => {
      status = headers["grpc-status"] ?? status;
      text = headers["grpc-message"] ?? text;
    };
    stream.setTimeout(10_000, () => stream.destroy(new Error(`${method}: no answer within 10 s`)));
    stream.on("response", readStatus);
    stream.on("trailers", readStatus);
    stream.on("data", (chunk) => chunks.push(chunk));
    stream.on("error", reject);
    stream.on("end", () => {
      if (status === "0") resolve(Buffer.concat(chunks).subarray(5));
      else reject(new Error(`${method}: status ${status}: ${decodeURIComponent(text ?? "")}`));
    });
    stream.end(Buffer.concat([head, message]));
  });
}

// ListObjectsRequest: caller (1) with an id of 16 bytes (1), selector (2) with a prefix (3), after (3).
// ListObjectsResponse: objects (1) with key (1) and length (2), is_last (2).
async function main() {
  const session = http2.connect(`http://${address}`);
  try {
    await new Promise((resolve, reject) => session.once("connect", resolve).once("error", reject));
    const caller = field(1, field(1, Buffer.alloc(16, 7)));
    const selector = field(2, field(3, Buffer.from(prefix)));
    let after = Buffer.alloc(0);
    let listed = 0;
    for (let isLast = false; !isLast; ) {
      const answer = await call(session, "ListObjects", Buffer.concat([caller, selector, field(3, after)]));
      isLast = true;
      const objects = [];
      for (const [number, value] of fields(answer)) if (number === 1) objects.push(value);
      for (const object of objects) {
        const found = Object.fromEntries(fields(object));
        after = found[1];
        console.log(`${found[1].toString()} ${found[2] ?? 0}`);
      }
      const last = [...fields(answer)].find(([number]) => number === 2);
      isLast = objects.length === 0 || last?.[1] === 1;
      listed += objects.length;
    }
    if (listed === 0) console.log("0 objects");
  } finally {
    session.close();
  }
}

main().catch((error) => {
  console.error(`${address}: ${error.message}`);
  process.exitCode = 1;
});
