//! Self-describing values: every byte depends on key, version, length and position.

/// The multiplier of the hash: an odd number with many one bits.
const MULTIPLIER: u64 = 0x9e37_79b9_7f4a_7c15;

/// The shortest value: the version, and one word that confirms it.
pub const LENGTH_MIN: usize = 16;

/// Returns the value of a key in a version. The first word is the version itself.
pub fn value(key: &str, version: u64, length: usize) -> Vec<u8> {
    let root = root(key, version, length);
    let mut value = vec![0; length];
    for (index, chunk) in value.chunks_mut(8).enumerate() {
        let word = if index == 0 { version } else { word(root, index) };
        chunk.copy_from_slice(&word.to_le_bytes()[..chunk.len()]);
    }
    value
}

/// Checks a value that was read under a key and returns its version.
///
/// # Errors
/// Names the offset of the first word that belongs to another key, version, length or position.
pub fn version_of(key: &str, value: &[u8]) -> Result<u64, String> {
    let first = if value.len() < LENGTH_MIN { None } else { value.first_chunk() };
    let Some(first) = first else {
        return Err(format!("value is too short key={key} bytes={}", value.len()));
    };
    let version = u64::from_le_bytes(*first);
    let root = root(key, version, value.len());
    let is_wrong = |(index, chunk): &(usize, &[u8])| {
        *index > 0 && **chunk != word(root, *index).to_le_bytes()[..chunk.len()]
    };
    match value.chunks(8).enumerate().find(is_wrong) {
        None => Ok(version),
        Some((index, _)) => {
            let length = value.len();
            Err(format!("key={key} version={version} bytes={length} wrong_from={}", index * 8))
        }
    }
}

fn root(key: &str, version: u64, length: usize) -> u64 {
    let numbers = [version, length as u64];
    let words = key.bytes().map(u64::from).chain(numbers);
    words.fold(MULTIPLIER, |root, number| mix(root ^ number))
}

fn word(root: u64, index: usize) -> u64 {
    mix(root.wrapping_add(index as u64))
}

fn mix(number: u64) -> u64 {
    let spread = (number ^ (number >> 29)).wrapping_mul(MULTIPLIER);
    spread ^ (spread >> 32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_is_read_back_and_wrong_bytes_are_detected() {
        let good = value("k", 7, 1003);
        assert_eq!(version_of("k", &good), Ok(7));
        assert!(version_of("other", &good).is_err());
        assert!(version_of("k", &good[..1000]).is_err());
        for at in [0, 8, 500, 1002] {
            let mut bad = good.clone();
            bad[at] ^= 1;
            assert!(version_of("k", &bad).is_err(), "byte {at} was changed");
        }
        let mut torn = value("k", 8, 1003);
        torn[504..].copy_from_slice(&good[504..]);
        assert!(version_of("k", &torn).unwrap_err().ends_with("wrong_from=504"));
        assert!(version_of("k", &[0; 8]).is_err());
    }
}
