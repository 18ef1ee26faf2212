//! Fuzzes the decoders of what lies on disk.

use mooncake_base::fuzz::{Target, check, outcome};

use crate::format::{
    ExtentHead, Name, RecordHead,
    identity::Identity,
    index::{Entry, Trailer, entries},
};

const NAME: Name<'_> = Name { tenant: "default", key: b"key", version: 5 };

fn records() -> Target {
    let run = |bytes: &[u8]| {
        let Some(head) = RecordHead::decode(bytes) else {
            return outcome(RecordHead::announced_bytes(bytes));
        };
        let layout = head.layout(4096);
        assert!(layout.head_bytes <= bytes.len() as u64);
        let payload = &bytes[layout.head_bytes as usize..];
        outcome((head.name.key.len(), head.holds_all(payload)))
    };
    let seeds = [&b""[..], b"payload"].map(|payload| {
        let mut bytes = Vec::new();
        RecordHead::encode(NAME, 2, 4096, payload, &mut bytes);
        bytes.extend_from_slice(payload);
        bytes
    });
    Target { name: "record", seeds: seeds.to_vec(), run }
}

fn indexes() -> Target {
    let run = |bytes: &[u8]| {
        let mut again = Vec::new();
        let mut is_whole = true;
        for entry in entries(bytes) {
            match entry {
                Some(entry) => entry.encode(&mut again),
                None => is_whole = false,
            }
        }
        assert!(bytes.starts_with(&again) && is_whole == (again.len() == bytes.len()));
        outcome((again.len(), is_whole))
    };
    let mut seed = Vec::new();
    Entry { offset: 4096, length: 9, name: NAME }.encode(&mut seed);
    Entry { offset: 8192, length: 0, name: NAME }.encode(&mut seed);
    Target { name: "index", seeds: vec![seed], run }
}

fn heads() -> Target {
    let run = |bytes: &[u8]| {
        let head = ExtentHead::decode(bytes);
        assert!(head.is_none_or(|head| bytes.starts_with(&head.encode())));
        let trailer = Trailer::decode(bytes);
        assert!(trailer.is_none_or(|trailer| bytes.starts_with(&trailer.encode())));
        outcome((head.is_some(), trailer.is_some()))
    };
    let seeds = vec![
        ExtentHead { directory: [1; 16], generation: 2, mark: 3 }.encode().to_vec(),
        Trailer { mark: 1, index_at: 2, index_bytes: 3, index_sum: 4 }.encode().to_vec(),
    ];
    Target { name: "head and trailer", seeds, run }
}

fn identities() -> Target {
    let run = |bytes: &[u8]| outcome(Identity::decode(bytes).map(|_| ()).is_ok());
    let seed =
        Identity { id: [1; 16], incarnation: 1, features: 0, unit: 4096, extent_bytes: 1 << 20 };
    Target { name: "identity", seeds: vec![seed.encode().into_bytes()], run }
}

#[test]
fn decoders_take_any_bytes() {
    check(&[records(), indexes(), heads(), identities()]);
}
