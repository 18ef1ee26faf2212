//! Real devices, where there are any: each test says why it does nothing elsewhere.
#![cfg(feature = "rdma")]
#![allow(clippy::print_stderr, reason = "a test that skips itself says why")]

use std::{ptr::NonNull, sync::Arc};

use mooncake_verbs::{
    Access, CompletionQueue, Context, Error, Library, MemoryRegion, PortState, ProtectionDomain,
};

/// The first device, opened, or nothing with the reason on the standard error stream.
fn device() -> Option<Arc<Context>> {
    let library = match Library::load() {
        Ok(library) => library,
        Err(error) => {
            eprintln!("skipped: {error}");
            return None;
        }
    };
    let devices = library.devices().expect("the kernel lists its devices");
    let Some(device) = devices.first() else {
        eprintln!("skipped: this machine has no RDMA device");
        return None;
    };
    Some(device.open().expect("a device of this machine can be opened"))
}

#[test]
fn a_device_says_its_name_its_ports_and_their_addresses() {
    let Some(context) = device() else { return };
    assert!(!context.device().name().is_empty());
    assert!(mooncake_verbs::device_names().unwrap().contains(&context.device().name().to_owned()));
    let limits = context.limits().unwrap();
    assert!(limits.ports >= 1 && limits.completions_max >= 1, "{limits:?}");
    for number in 1..=limits.ports {
        let port = context.port(number).unwrap();
        let gids = context.gids(number).unwrap();
        eprintln!("{:?} {number} {port:?} {gids:?}", context.device());
        assert!(gids.len() <= port.gid_count as usize);
        if port.state == PortState::Active {
            assert!(port.mtu_bytes >= 256 && !gids.is_empty());
        }
    }
}

#[test]
fn a_port_that_does_not_exist_is_an_error_that_names_the_device() {
    let Some(context) = device() else { return };
    let error = context.port(200).unwrap_err();
    assert!(error.to_string().contains(context.device().name()), "{error}");
    assert!(context.gid(1, u32::MAX).is_err());
}

#[test]
fn registered_memory_has_keys_and_outlives_the_handles_it_was_made_from() {
    let Some(context) = device() else { return };
    let domain = ProtectionDomain::new(&context).unwrap();
    let mut memory = vec![7_u8; 64 * 1024];
    let base = NonNull::new(memory.as_mut_ptr()).unwrap();
    let register = |length, access| {
        // SAFETY: `memory` outlives the regions, and nothing is posted that would write to it.
        unsafe { MemoryRegion::register(&domain, base, length, access) }
    };
    let first = register(memory.len(), Access::RemoteReadWrite).unwrap();
    let second = register(4096, Access::Destination).unwrap();
    assert_ne!(first.local_key(), second.local_key());
    assert_ne!(first.remote_key(), 0);
    assert_eq!((first.base(), first.length()), (base, 64 * 1024));
    drop(context);
    drop(domain);
    assert!(!first.domain().context().device().name().is_empty());
    drop(first);
    drop(second);
    assert!(memory.iter().all(|byte| *byte == 7));
}

#[test]
fn memory_that_is_not_mapped_cannot_be_registered() {
    let Some(context) = device() else { return };
    let domain = ProtectionDomain::new(&context).unwrap();
    let nowhere = NonNull::without_provenance(std::num::NonZeroUsize::new(4096).unwrap());
    // SAFETY: nothing lies in the first pages, so that there is nothing to be disturbed; the
    // kernel finds that out.
    let refused =
        unsafe { MemoryRegion::register(&domain, nowhere, 4096, Access::RemoteReadWrite) };
    let Err(Error::Call { call, source, .. }) = refused else { panic!("{refused:?}") };
    assert_eq!(call, "ibv_reg_mr");
    assert!(source.raw_os_error().is_some(), "{source}");
}

#[test]
fn a_completion_queue_has_the_room_asked_for_and_is_empty_at_first() {
    let Some(context) = device() else { return };
    let queue = CompletionQueue::new(&context, 100).unwrap();
    assert!(queue.capacity() >= 100);
    assert_eq!(queue.poll(|completion| panic!("{completion:?}")).unwrap(), 0);
    let too_many = context.limits().unwrap().completions_max + 1;
    assert!(CompletionQueue::new(&context, too_many).is_err());
    assert!(CompletionQueue::new(&context, u32::MAX).is_err());
}
