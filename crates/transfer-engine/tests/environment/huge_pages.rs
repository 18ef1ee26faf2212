//! Segments in reserved huge pages.

use mooncake_transfer_engine::{Engine, EngineConfig, HugePages, Opcode, TransportKind};

use crate::{
    child::ChildPeer,
    pair::{Lent, config, held, move_one, pattern, runtime, soon, start},
};

const PAGE: usize = 2 << 20;

/// The huge pages that the test lends at a time.
const WANTED: usize = 3;

/// Returns why there are too few huge pages.
pub(crate) fn missing() -> Option<String> {
    let remedy = "reserve some with sysctl vm.nr_hugepages=16";
    (free_pages() < WANTED).then(|| format!("needs {WANTED} free huge pages; {remedy}"))
}

pub(crate) fn are_lent_over_every_transport_and_given_back() {
    let free = free_pages();
    for kind in [TransportKind::Memory, TransportKind::Shm, TransportKind::Tcp] {
        let runtime = runtime();
        let (near, far) = (start(Some(kind), &runtime), start_huge(Some(kind), &runtime));
        let peer = near.open(far.segment_name(), soon()).unwrap();
        // Not a whole number of pages, and one page more than is used.
        let length = (WANTED - 1) * PAGE - 5;
        let lent = Lent::shared(&far, length);
        assert_eq!(page_bytes(lent.base()), PAGE, "{kind}");
        assert_eq!(lent.length() as usize, (WANTED - 1) * PAGE, "{kind}");
        for (offset, length) in [(0, length), (7, 1), (PAGE - 1, 4097), (PAGE, 300_000)] {
            let mut bytes = pattern(length, offset);
            let wanted = bytes.clone();
            let address = lent.base() + offset as u64;
            move_one(&near, &peer, Opcode::Write, (held(&mut bytes), address)).unwrap();
            bytes.fill(0);
            move_one(&near, &peer, Opcode::Read, (held(&mut bytes), address)).unwrap();
            assert!(bytes == wanted, "{kind} {length} at {offset}");
        }
        assert!(free_pages() < free, "{kind}");
        lent.withdraw().unwrap();
        drop((peer, near, far));
        assert_eq!(free_pages(), free, "{kind}");
    }
    are_mapped_by_another_process();
    falls_back_to_ordinary_pages();
    assert_eq!(free_pages(), free);
}

fn are_mapped_by_another_process() {
    let runtime = runtime();
    let engine = start_huge(None, &runtime);
    let lent = Lent::shared(&engine, WANTED * PAGE);
    let mut child = ChildPeer::start();
    child.touch(&engine, lent.base() + PAGE as u64);
    assert_eq!(engine.snapshot().incoming.open, 0, "the transfer used shared memory");
    child.begin_flood(&engine, lent.base(), WANTED * PAGE);
    let last = (lent.base() as usize + WANTED * PAGE - 1) as *const u8;
    // SAFETY: the address is in mapped memory, and any byte that the peer writes is a valid value.
    while unsafe { last.read_volatile() } < 2 {
        std::thread::yield_now();
    }
    lent.withdraw().unwrap();
    assert!(child.await_refusal() > 0);
}

fn falls_back_to_ordinary_pages() {
    let runtime = runtime();
    let engine = start_huge(None, &runtime);
    let lent = Lent::shared(&engine, (free_pages() + 1) * PAGE);
    assert_ne!(page_bytes(lent.base()), PAGE);
    let peer = engine.open(engine.segment_name(), soon()).unwrap();
    let one = (held(&mut [7]), lent.base() + lent.length() - 1);
    move_one(&engine, &peer, Opcode::Write, one).unwrap();
}

fn start_huge(only: Option<TransportKind>, runtime: &tokio::runtime::Runtime) -> Engine {
    let config = EngineConfig { huge_pages: Some(HugePages::TwoMiB), ..config(only) };
    Engine::start(config, runtime.handle().clone()).unwrap()
}

/// Returns the number of huge pages that are neither used nor reserved.
fn free_pages() -> usize {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap();
    let of = |name: &str| {
        let line = text.lines().find(|line| line.starts_with(name));
        line.and_then(|line| line.split_whitespace().nth(1)?.parse::<usize>().ok()).unwrap_or(0)
    };
    of("HugePages_Free:") - of("HugePages_Rsvd:")
}

/// Returns the size of the pages that are mapped at an address.
fn page_bytes(base: u64) -> usize {
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let head = format!("{base:x}-");
    let mut lines = maps.lines().skip_while(|line| !line.starts_with(&head));
    let line = lines.find(|line| line.starts_with("KernelPageSize:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() << 10
}
