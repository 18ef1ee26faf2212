//! The messages between clients and the master (protobuf package `mooncake.v1`), and the frames of
//! the native protocol that carry them.
//!
//! [`v1`] is generated from `proto/mooncake/v1/master.proto` by `make generate` and committed, so
//! that no build needs `protoc`. [`calls`] has a row for each call: its names, how it is repeated, its
//! items and keys. [`columns`] is the encoding of batches.
//! [`native_frame`] is the codec of the native protocol, without I/O, [`native_token`] the proof of a
//! token in its greeting. [`decode_limits`] bounds the
//! memory of decoded messages. [`records`] holds the messages between clients about records on disk,
//! [`standby`] those between several masters.
//! [`convert`] converts wire types to the checked types of
//! `mooncake-base` and back.
#![warn(missing_docs)]

pub mod calls;
pub mod columns;
pub mod convert;
pub mod decode_limits;
#[cfg(test)]
mod fuzz;
#[cfg(feature = "grpc")]
pub mod grpc;
pub mod items;
pub mod native_frame;
pub mod native_token;
#[cfg(test)]
mod recorded;
pub mod records;
pub mod standby;

/// The generated messages, and with the feature `grpc` the service.
pub mod v1 {
    #![allow(
        missing_docs,
        unreachable_pub,
        unused_qualifications,
        elided_lifetimes_in_paths,
        clippy::all,
        clippy::pedantic,
        clippy::restriction,
        reason = "generated: the comments are in the .proto file"
    )]

    include!("generated/mooncake.v1.rs");

    #[cfg(feature = "grpc")]
    include!("generated/mooncake.v1.service.rs");
}

/// The compiled file descriptor set, for gRPC reflection.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!("generated/descriptors.bin");
