//! Memory for results that are not written yet, used again so that its pages exist already.

use std::{
    ops::{Deref, DerefMut},
    sync::Arc,
};

use mooncake_base::sync::Mutex;
use mooncake_os::memory::prefer_huge_pages;

/// Shorter buffers are not worth keeping.
const KEPT_BYTES_MIN: usize = 16 << 10;
/// From this length on, a buffer has huge pages in it.
const HUGE_BYTES_MIN: usize = 4 << 20;
/// Most memory that is kept while no operation uses it.
const KEPT_BYTES_MAX: usize = 256 << 20;

/// Buffers of one process that are not in use.
#[derive(Debug, Default)]
pub(crate) struct Buffers(Mutex<Vec<Vec<u8>>>);

/// A buffer that goes back when it is dropped.
#[derive(Debug, Default)]
pub(crate) struct Buffer {
    bytes: Vec<u8>,
    length: usize,
    home: Option<Arc<Buffers>>,
}

impl Buffers {
    /// Returns a buffer. Its bytes are those of an earlier use.
    pub(crate) fn take(self: &Arc<Self>, length: usize) -> Buffer {
        if length < KEPT_BYTES_MIN {
            return Buffer::from(vec![0; length]);
        }
        let mut kept = self.0.lock();
        let fits = kept.iter().enumerate().filter(|(_, bytes)| bytes.len() >= length);
        let smallest = fits.min_by_key(|(_, bytes)| bytes.len()).map(|(index, _)| index);
        let found = smallest.map(|index| kept.swap_remove(index));
        drop(kept);
        let bytes = found.unwrap_or_else(|| new_bytes(length));
        Buffer { bytes, length, home: Some(Arc::clone(self)) }
    }
}

/// Returns new memory, on huge pages if it is large: the kernel fills them in fewer steps.
fn new_bytes(length: usize) -> Vec<u8> {
    let bytes = vec![0; length];
    if length >= HUGE_BYTES_MIN {
        prefer_huge_pages(bytes.as_ptr() as usize, length);
    }
    bytes
}

impl From<Vec<u8>> for Buffer {
    fn from(bytes: Vec<u8>) -> Self {
        Self { length: bytes.len(), bytes, home: None }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let Some(home) = self.home.take() else { return };
        let bytes = std::mem::take(&mut self.bytes);
        let mut kept = home.0.lock();
        if kept.iter().map(Vec::len).sum::<usize>() + bytes.len() <= KEPT_BYTES_MAX {
            kept.push(bytes);
        }
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[..self.length]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_buffers_are_used_again_up_to_a_limit() {
        let buffers = Arc::new(Buffers::default());
        let first = buffers.take(KEPT_BYTES_MIN);
        let place = first.as_ptr();
        drop(first);
        let second = buffers.take(KEPT_BYTES_MIN);
        assert_eq!(second.as_ptr(), place);
        assert_eq!(second.len(), KEPT_BYTES_MIN);
        drop(buffers.take(KEPT_BYTES_MIN - 1));
        drop(buffers.take(KEPT_BYTES_MAX + 1));
        assert!(buffers.0.lock().is_empty());
    }
}
