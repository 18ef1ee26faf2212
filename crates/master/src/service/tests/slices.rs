//! Large calls unlock the state between slices.

use mooncake_base::Incarnation;

use super::*;
use crate::service::SLICE_ITEMS;

/// Returns how often a call locks the state.
fn locks_of<R>(service: &Service, call: impl FnOnce() -> R) -> (R, u64) {
    let before = service.shared.locks();
    let result = call();
    (result, service.shared.locks() - before)
}

#[test]
fn locate_of_many_keys_is_done_in_slices() {
    const KEYS: usize = 3 * SLICE_ITEMS + 1;
    let (service, id) = lent();
    let keys: Vec<String> = (0..KEYS).map(|key| format!("k{key}")).collect();
    let items: Vec<(&str, u64)> = keys.iter().map(|key| (key.as_str(), 8)).collect();
    let (_, columns) = started(&service, put_start(id, &items));
    assert_eq!(failures(&ask(&service, put_end(id, &columns.versions))), 0);
    let locate = |keys: &[String], fence| {
        let keys = Some(v1::KeyColumn::pack(keys));
        let call = v1::LocateRequest {
            caller: caller(id),
            keys,
            fence,
            lease: true,
            ..Default::default()
        };
        let (answer, locks) = locks_of(&service, || ask(&service, Call::Locate(call)));
        let response::Call::Locate(answer) = answer else { panic!("{answer:?}") };
        let found = answer.columns.unwrap();
        assert!(found.failures.is_empty() && found.versions.iter().all(|&version| version > 0));
        (found.versions.len(), answer.fence_ms, locks)
    };
    let slices = KEYS.div_ceil(SLICE_ITEMS) as u64;
    let (found, fence, locks) = locate(&keys, true);
    assert_eq!(found, KEYS);
    assert!(locks >= 2 * slices, "locks={locks}");
    let (_, small_fence, locks) = locate(&keys[..SLICE_ITEMS], true);
    assert!(locks <= 2, "a call of one slice looks up its keys once: {locks}");
    assert!(fence >= small_fence && small_fence > 0, "{fence} {small_fence}");
    let (_, no_fence, locks) = locate(&keys, false);
    assert!(no_fence == 0 && (slices..2 * slices).contains(&locks), "locks={locks}");
}

#[test]
fn segments_are_listed_in_slices_by_name() {
    const SEGMENTS: usize = 3 * SLICE_ITEMS;
    let (service, _) = lent();
    {
        let mut state = service.shared.lock();
        for number in 0..SEGMENTS {
            let client = ClientId::from_bits(100 + number as u128);
            let name = format!("host-{}:1", number * 7919 % SEGMENTS);
            state.register(service.now(), client, &name).unwrap();
            let spec = crate::state::SegmentSpec {
                id: SegmentId::from_bits(1000 + number as u128),
                incarnation: Incarnation(1),
                name: name.clone(),
                endpoint: name,
                base: 1 << 40,
                length: 1 << 20,
                protocol: "tcp".to_owned(),
            };
            state.mount(service.now(), client, spec).unwrap();
        }
    }
    let (segments, locks) = locks_of(&service, || service.segments());
    let names: Vec<_> =
        segments.iter().map(|view| view.segment.as_ref().unwrap().name.clone()).collect();
    assert!(names.len() == SEGMENTS + 1 && names.is_sorted());
    assert!(locks >= 3, "locks={locks}");
}
