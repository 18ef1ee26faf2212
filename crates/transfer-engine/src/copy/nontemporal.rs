//! Copying past the caches, for what is larger than they should be filled with.
//!
//! A processor that copies memory as `memcpy` does waits for memory most of the time, and reads
//! what it is going to overwrite. Here its stores read nothing first. Some processors follow one
//! stream of reads too slowly all the same: they copy four pages side by side, so that four streams
//! are followed at once (9 to 11 GB/s of what is in no cache, against 6 to 7 by `memcpy`). Others are
//! fastest from end to end (16 to 19 GB/s on a Zen 4, against 11 to 14 side by side and 9 to 11 by
//! `memcpy`). So from 32 KiB on. What is in a cache already is copied more slowly than by `memcpy`,
//! and is in none afterwards.

#[cfg(target_arch = "x86_64")]
use std::{arch::x86_64::__cpuid, sync::LazyLock};

use super::copy_cached;

/// Copied side by side, this far apart.
const PAGE: usize = 4 << 10;
const PAGES: usize = 4;
const BLOCK: usize = PAGES * PAGE;

/// What a store past the caches should fill whole.
const LINE: usize = 64;

/// Shorter copies gain nothing.
pub(super) const LENGTH_MIN: usize = BLOCK;

/// Whether this processor is of a maker whose processors are faster from end to end.
#[cfg(target_arch = "x86_64")]
static IS_SEQUENTIAL_FASTER: LazyLock<bool> = LazyLock::new(|| {
    let words = __cpuid(0);
    let name = [words.ebx, words.edx, words.ecx].map(u32::to_le_bytes);
    matches!(name.as_flattened(), b"AuthenticAMD" | b"HygonGenuine")
});

/// Copies, past the caches where the ranges are apart. They may overlap.
///
/// # Safety
/// Both ranges are mapped, the first can be read and the second written, until this returns.
pub(super) unsafe fn copy(source: usize, target: usize, length: usize) {
    let head = (target.next_multiple_of(LINE) - target).min(length);
    let body = (length - head) / BLOCK * BLOCK;
    if source.abs_diff(target) < length || body == 0 || cfg!(not(target_arch = "x86_64")) {
        // SAFETY: as promised to us.
        unsafe { copy_cached(source, target, length) };
        return;
    }
    // SAFETY: a part of what was promised to us.
    unsafe { copy_cached(source, target, head) };
    #[cfg(target_arch = "x86_64")]
    {
        let copy_body = if *IS_SEQUENTIAL_FASTER { copy_sequential } else { copy_interleaved };
        // SAFETY: as above; the target begins with a line, and the length is one of whole blocks.
        unsafe { copy_body(source + head, target + head, body) };
        // Who hears that the copy is done must find its bytes.
        // SAFETY: every processor of this kind has it.
        unsafe { std::arch::x86_64::_mm_sfence() };
    }
    let done = head + body;
    // SAFETY: as above.
    unsafe { copy_cached(source + done, target + done, length - done) };
}

/// One line of the page that begins so many bytes further: asks for memory ahead, which touches
/// nothing wherever it is, then moves 64 bytes.
#[cfg(target_arch = "x86_64")]
macro_rules! line {
    ($page:literal) => {
        concat!(
            concat!("prefetcht0 [{source} + 256 + ", $page, "]\n"),
            concat!("movups xmm0, [{source} + ", $page, "]\n"),
            concat!("movups xmm1, [{source} + 16 + ", $page, "]\n"),
            concat!("movups xmm2, [{source} + 32 + ", $page, "]\n"),
            concat!("movups xmm3, [{source} + 48 + ", $page, "]\n"),
            concat!("movntps [{target} + ", $page, "], xmm0\n"),
            concat!("movntps [{target} + 16 + ", $page, "], xmm1\n"),
            concat!("movntps [{target} + 32 + ", $page, "], xmm2\n"),
            concat!("movntps [{target} + 48 + ", $page, "], xmm3\n"),
        )
    };
}

/// Written in the processor's own words: it is as fast in a build for tests, and the order of its
/// loads and stores is nobody's to change.
///
/// # Safety
/// As for [`copy`]; besides, the ranges do not overlap, `target` is a multiple of [`LINE`] and
/// `length` one of [`BLOCK`].
#[cfg(target_arch = "x86_64")]
unsafe fn copy_interleaved(source: usize, target: usize, length: usize) {
    let mut done = 0;
    while done < length {
        // SAFETY: it moves the lines of four pages, which lie in both ranges; every processor of
        // this kind knows these instructions.
        unsafe {
            std::arch::asm!(
                "2:",
                line!(0),
                line!(4096),
                line!(8192),
                line!(12288),
                "add {source}, 64",
                "add {target}, 64",
                "dec {lines}",
                "jnz 2b",
                source = inout(reg) source + done => _,
                target = inout(reg) target + done => _,
                lines = inout(reg) PAGE / LINE => _,
                out("xmm0") _,
                out("xmm1") _,
                out("xmm2") _,
                out("xmm3") _,
                options(nostack),
            );
        }
        done += BLOCK;
    }
}

/// The same from end to end.
///
/// # Safety
/// As for [`copy_interleaved`]; it is enough if `length` is a multiple of [`LINE`].
#[cfg(target_arch = "x86_64")]
unsafe fn copy_sequential(source: usize, target: usize, length: usize) {
    // SAFETY: it moves the lines of both ranges, one after the other.
    unsafe {
        std::arch::asm!(
            "2:",
            line!(0),
            "add {source}, 64",
            "add {target}, 64",
            "dec {lines}",
            "jnz 2b",
            source = inout(reg) source => _,
            target = inout(reg) target => _,
            lines = inout(reg) length / LINE => _,
            out("xmm0") _,
            out("xmm1") _,
            out("xmm2") _,
            out("xmm3") _,
            options(nostack),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_alignment_and_length_copies_all_the_bytes_and_no_others() {
        let from: Vec<u8> = (0..3 * BLOCK).map(|i| (i % 251) as u8).collect();
        for length in [0, 1, BLOCK - 1, BLOCK, BLOCK + 63, BLOCK + 64, 2 * BLOCK + 4097] {
            for (source, target) in [(0, 0), (1, 0), (0, 1), (17, 63), (64, 8), (4095, 16)] {
                let mut to = vec![0xEE_u8; 3 * BLOCK];
                let (start, end) = (from.as_ptr() as usize, target + length);
                // SAFETY: both vectors are longer than what is copied, and nobody else uses them.
                unsafe { copy(start + source, to.as_mut_ptr() as usize + target, length) };
                assert!(to[target..end] == from[source..source + length], "{length} {source}");
                let beside = to[..target].iter().chain(&to[end..]);
                assert!(beside.copied().all(|byte| byte == 0xEE), "{length} {target}");
            }
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn both_ways_copy_alike_whichever_this_processor_takes() {
        let from: Vec<u8> = (0..2 * BLOCK).map(|i| (i % 251) as u8).collect();
        for copy in [copy_sequential, copy_interleaved] {
            let mut to = vec![0xEE_u8; 3 * BLOCK];
            let first = to.as_mut_ptr() as usize;
            let target = first.next_multiple_of(LINE);
            // SAFETY: both vectors are longer than what is copied, and nobody else uses them.
            unsafe { copy(from.as_ptr() as usize, target, 2 * BLOCK) };
            let (before, rest) = to.split_at(target - first);
            let (copied, after) = rest.split_at(2 * BLOCK);
            assert!(copied == from);
            assert!(before.iter().chain(after).all(|byte| *byte == 0xEE));
        }
    }

    #[test]
    fn ranges_that_overlap_are_moved_as_if_by_way_of_a_third() {
        for (source, target) in [(0, 100), (100, 0), (0, BLOCK), (BLOCK, 0), (5, 5)] {
            let mut bytes: Vec<u8> = (0..4 * BLOCK).map(|i| (i % 251) as u8).collect();
            let wanted = bytes[source..source + 2 * BLOCK].to_vec();
            let base = bytes.as_mut_ptr() as usize;
            // SAFETY: both ranges lie in the vector, and nobody else uses it.
            unsafe { copy(base + source, base + target, 2 * BLOCK) };
            assert!(bytes[target..target + 2 * BLOCK] == wanted, "{source} {target}");
        }
    }
}
