//! Blocking clients of key-value servers, with deadlines: Redis' protocol, etcd's JSON gateway, and
//! HTTP with or without TLS.
//!
//! Metadata stores and the election of a leader are built on them. The crate knows no runtime and no
//! keys of ours.
//!
//! In reading order: [`texts`] (the words of errors), [`http`] (requests and answers, whole or line
//! by line), [`etcd`] (the members of a cluster), [`resp`] (Redis' protocol), [`redis`] (connections
//! that are logged in).
#![warn(missing_docs)]

pub mod etcd;
pub mod http;
#[cfg(feature = "test-util")]
pub mod real_server;
pub mod redis;
pub mod resp;
pub mod texts;

pub use texts::ErrorTexts;
