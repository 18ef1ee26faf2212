//! Values whose every byte tells to which key, version and length it belongs, and where in it.

/// What a word is derived from, besides its place: any odd number of many ones.
const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;

/// The shortest value that tells its version and something that confirms it.
pub const LENGTH_MIN: usize = 16;

/// The value of that key in that version. The first word is the version itself.
pub fn value(key: &str, version: u64, length: usize) -> Vec<u8> {
    let root = root(key, version, length);
    let mut value = vec![0; length];
    for (place, chunk) in value.chunks_mut(8).enumerate() {
        let word = if place == 0 { version } else { word(root, place) };
        chunk.copy_from_slice(&word.to_le_bytes()[..chunk.len()]);
    }
    value
}

/// The version of a value that was read under that key.
///
/// # Errors
/// Says where the first byte is that belongs to another key, version, length or place.
pub fn version_of(key: &str, value: &[u8]) -> Result<u64, String> {
    let Some((first, _)) = value.split_first_chunk::<8>().filter(|_| value.len() >= LENGTH_MIN)
    else {
        return Err(format!("key={key} is too short bytes={}", value.len()));
    };
    let version = u64::from_le_bytes(*first);
    let root = root(key, version, value.len());
    let is_wrong = |(place, chunk): &(usize, &[u8])| {
        *place > 0 && **chunk != word(root, *place).to_le_bytes()[..chunk.len()]
    };
    match value.chunks(8).enumerate().find(is_wrong) {
        None => Ok(version),
        Some((place, _)) => {
            let length = value.len();
            Err(format!("key={key} version={version} bytes={length} wrong_from={}", place * 8))
        }
    }
}

fn root(key: &str, version: u64, length: usize) -> u64 {
    let numbers = [version, length as u64];
    let words = key.bytes().map(u64::from).chain(numbers);
    words.fold(SPREAD, |root, number| mix(root ^ number))
}

fn word(root: u64, place: usize) -> u64 {
    mix(root.wrapping_add(place as u64))
}

fn mix(number: u64) -> u64 {
    let spread = (number ^ (number >> 29)).wrapping_mul(SPREAD);
    spread ^ (spread >> 32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_tells_its_version_and_no_other_bytes_pass_for_it() {
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
