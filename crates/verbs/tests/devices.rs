//! Tests on a real RDMA device, reported as ignored where there is none.
#![allow(clippy::unwrap_used, reason = "tests, also in the functions that they share")]

use std::{process::ExitCode, ptr::NonNull, sync::Arc};

use libtest_mimic::Arguments;
use mooncake_base::requirement::trial;
use mooncake_verbs::{
    Access, CompletionQueue, Context, Device, Error, Library, MemoryRegion, PortState,
    ProtectionDomain,
};

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let missing = first_device().err();
    let tests: [(&str, fn()); 5] = [
        ("device_has_a_name_ports_and_addresses", device_has_a_name_ports_and_addresses),
        ("unknown_port_is_an_error_that_names_the_device", unknown_port_is_an_error),
        ("region_has_keys_and_outlives_its_parents", region_has_keys_and_outlives_its_parents),
        ("refuses_to_register_unmapped_memory", refuses_to_register_unmapped_memory),
        ("completion_queue_starts_empty", completion_queue_starts_empty),
    ];
    let trials = tests.map(|(name, test)| trial(missing.clone(), name, test));
    libtest_mimic::run(&arguments, trials.into()).exit_code()
}

/// Returns the first device of this machine, or why there is none.
fn first_device() -> Result<Device, String> {
    let library = Library::load().map_err(|error| format!("needs libibverbs: {error}"))?;
    let devices = library.devices().expect("the kernel lists its devices");
    devices.into_iter().next().ok_or_else(|| "needs an RDMA device".to_owned())
}

fn device() -> Arc<Context> {
    first_device().unwrap().open().expect("a device of this machine can be opened")
}

fn device_has_a_name_ports_and_addresses() {
    let context = device();
    assert!(!context.device().name().is_empty());
    assert!(mooncake_verbs::device_names().unwrap().contains(&context.device().name().to_owned()));
    let limits = context.limits().unwrap();
    assert!(limits.ports >= 1 && limits.completions_max >= 1, "{limits:?}");
    for number in 1..=limits.ports {
        let port = context.port(number).unwrap();
        let gids = context.gids(number).unwrap();
        assert!(gids.len() <= port.gid_count as usize);
        if port.state == PortState::Active {
            assert!(port.mtu_bytes >= 256 && !gids.is_empty());
        }
    }
}

fn unknown_port_is_an_error() {
    let context = device();
    let error = context.port(200).unwrap_err();
    assert!(error.to_string().contains(context.device().name()), "{error}");
    assert!(context.gid(1, u32::MAX).is_err());
}

fn region_has_keys_and_outlives_its_parents() {
    let context = device();
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

fn refuses_to_register_unmapped_memory() {
    let context = device();
    let domain = ProtectionDomain::new(&context).unwrap();
    let nowhere = NonNull::without_provenance(std::num::NonZeroUsize::new(4096).unwrap());
    // SAFETY: nothing is mapped in the first pages, so that nothing can be overwritten; the
    // kernel refuses them.
    let refused =
        unsafe { MemoryRegion::register(&domain, nowhere, 4096, Access::RemoteReadWrite) };
    let Err(Error::Call { call, source, .. }) = refused else { panic!("{refused:?}") };
    assert_eq!(call, "ibv_reg_mr");
    assert!(source.raw_os_error().is_some(), "{source}");
}

fn completion_queue_starts_empty() {
    let context = device();
    let queue = CompletionQueue::new(&context, 100).unwrap();
    assert!(queue.capacity() >= 100);
    assert_eq!(queue.poll(|completion| panic!("{completion:?}")).unwrap(), 0);
    let too_many = context.limits().unwrap().completions_max + 1;
    assert!(CompletionQueue::new(&context, too_many).is_err());
    assert!(CompletionQueue::new(&context, u32::MAX).is_err());
}
