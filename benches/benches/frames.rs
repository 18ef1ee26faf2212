//! Encoding and decoding of frames of the native protocol.
//!
//! `cargo bench -p mooncake-benches --bench frames`
#![allow(clippy::unwrap_used, reason = "a benchmark that fails should stop")]

use std::time::Duration;

use bytes::BytesMut;
use criterion::{Criterion, criterion_group, criterion_main};
use mooncake_proto::{
    native_frame::{self, FRAME_BYTES_MAX},
    v1::{Caller, KeyColumn, LocateRequest, Request, request::Call},
};

fn request(keys: usize) -> Request {
    let keys = Some(KeyColumn::pack((0..keys).map(|index| format!("{index:064}"))));
    let caller = Some(Caller { client: vec![7; 16].into(), tenant: String::new() });
    Request {
        call: Some(Call::Locate(LocateRequest {
            caller,
            keys,
            lease: true,
            fence: true,
            ..Default::default()
        })),
        ..Default::default()
    }
}

fn frames(c: &mut Criterion) {
    let mut group = c.benchmark_group("locate");
    for keys in [1, 1000] {
        let request = request(keys);
        let mut wire = BytesMut::new();
        group.bench_function(format!("encode {keys} keys"), |b| {
            b.iter(|| {
                wire.clear();
                native_frame::encode(&request, &mut wire).unwrap();
            });
        });
        wire.clear();
        native_frame::encode(&request, &mut wire).unwrap();
        group.bench_function(format!("decode {keys} keys"), |b| {
            b.iter(|| {
                let mut frame = wire.clone();
                native_frame::decode::<Request>(&mut frame, FRAME_BYTES_MAX).unwrap().unwrap()
            });
        });
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1));
    targets = frames
}
criterion_main!(benches);
