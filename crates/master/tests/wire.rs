//! A started master over its protocols: native, gRPC, HTTP on the RPC port, admin and metadata.
#![allow(
    clippy::unwrap_used,
    reason = "integration tests are tests as a whole, which the lint does not see"
)]

#[path = "wire/support.rs"]
mod support;

#[path = "wire/admin.rs"]
mod admin;
#[path = "wire/full_pool.rs"]
mod full_pool;
#[path = "wire/grpc.rs"]
mod grpc;
#[path = "wire/jobs.rs"]
mod jobs;
#[path = "wire/limits.rs"]
mod limits;
#[path = "wire/metadata.rs"]
mod metadata;
#[path = "wire/native.rs"]
mod native;
#[path = "wire/start.rs"]
mod start;
#[path = "wire/token.rs"]
mod token;
