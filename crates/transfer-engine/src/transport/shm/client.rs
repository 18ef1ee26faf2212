//! The attaching side: the handshake with an owner, the regions that it announced, and copies to and
//! from them.
//!
//! In reading order: [`path`], [`handshake`], [`attachment`] (the regions of an owner), and
//! [`kernel_copy`] (memory that cannot be mapped).

mod attachment;
mod handshake;
mod kernel_copy;
mod path;

pub(super) use self::{attachment::Attachment, path::ShmPath};
