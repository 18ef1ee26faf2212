//! The functions of libibverbs over a simulated fabric.
//!
//! Each is called with objects that another one of them returned and that are alive, as the library
//! requires of its callers.
#![expect(
    clippy::multiple_unsafe_ops_per_block,
    reason = "a block reads or writes fields of one object that a caller passed"
)]

use std::{
    ffi::c_char,
    mem,
    ptr::{self, NonNull},
    sync::Arc,
    time::Duration,
};

use libc::{c_int, c_uint, c_void};
use rdma_sys::{
    ibv_access_flags, ibv_async_event, ibv_comp_channel, ibv_context, ibv_cq, ibv_device,
    ibv_device_attr, ibv_gid, ibv_mr, ibv_pd, ibv_port_attr, ibv_port_state, ibv_qp, ibv_qp_attr,
    ibv_qp_attr_mask as mask, ibv_qp_init_attr, ibv_qp_state, ibv_send_flags, ibv_send_wr, ibv_sge,
    ibv_wc, ibv_wr_opcode,
};

use super::{
    Fabric, LISTED, State,
    exported::ExportedBytes,
    objects::{
        ChannelObject, CompletionsObject, ContextHandle, ContextObject, DeviceObject, DomainObject,
        QueuePairObject, RegionObject, Reporter,
    },
    queues::{FakeQueuePair, INLINE_BYTES_MAX, PeerState, Posted, RegionBytes, RegionState, Span},
};
use crate::{
    Gid, Operation,
    library::{Functions, KindOfGid},
};

/// Entries of a completion queue and requests of a queue pair, at most.
const ENTRIES_MAX: c_int = 1 << 16;

/// Interrupts of a device for completions.
const VECTORS: c_int = 4;

/// Entries in the address table of a port.
const ADDRESSES_MAX: c_int = 8;

/// Returns the functions.
pub(super) fn table() -> Functions {
    Functions {
        ibv_get_device_list: get_device_list,
        ibv_free_device_list: free_device_list,
        ibv_get_device_name: get_device_name,
        ibv_get_device_guid: get_device_guid,
        ibv_open_device: open_device,
        ibv_close_device: close_device,
        ibv_query_device: query_device,
        ibv_query_port: query_port,
        ibv_query_gid: query_gid,
        ibv_get_async_event: get_async_event,
        ibv_ack_async_event: ack_async_event,
        ibv_alloc_pd: alloc_pd,
        ibv_dealloc_pd: dealloc_pd,
        ibv_reg_mr: reg_mr,
        ibv_dereg_mr: dereg_mr,
        ibv_create_comp_channel: create_comp_channel,
        ibv_destroy_comp_channel: destroy_comp_channel,
        ibv_create_cq: create_cq,
        ibv_destroy_cq: destroy_cq,
        ibv_get_cq_event: get_cq_event,
        ibv_ack_cq_events: ack_cq_events,
        ibv_create_qp: create_qp,
        ibv_modify_qp: modify_qp,
        ibv_query_qp: query_qp,
        ibv_destroy_qp: destroy_qp,
        ibv_reg_mr_iova2: None,
        ibv_reg_dmabuf_mr: Some(reg_dmabuf_mr),
        ibv_is_fork_initialized: Some(is_fork_initialized),
        ibv_fork_init: Some(fork_init),
        _ibv_query_gid_ex: Some(query_gid_ex),
    }
}

/// Returns the object that begins with the C type.
///
/// # Safety
/// The pointer is that of a living object of type `T`, which nobody writes meanwhile.
unsafe fn object<'a, T, C>(pointer: *mut C) -> &'a T {
    // SAFETY: by the contract of the function; `C` is the first field of `T`.
    unsafe { &*pointer.cast::<T>() }
}

/// Hands an object out as the C type that it begins with.
fn give<T, C>(object: Box<T>) -> *mut C {
    Box::into_raw(object).cast()
}

/// Takes back and drops an object that [`give`] handed out.
///
/// # Safety
/// The pointer is that of a living object of type `T`, and is not used again.
unsafe fn take<T, C>(pointer: *mut C) {
    // SAFETY: by the contract of the function; `C` is the first field of `T`.
    drop(unsafe { Box::from_raw(pointer.cast::<T>()) });
}

fn set_errno(number: c_int) {
    // SAFETY: the location belongs to the calling thread.
    unsafe { *libc::__errno_location() = number };
}

fn refuse<T>(number: c_int) -> *mut T {
    set_errno(number);
    ptr::null_mut()
}

/// Returns the context that an object was made from.
///
/// # Safety
/// The pointer is that of a living context of this library.
unsafe fn of_context<'a>(context: *mut ibv_context) -> &'a ContextObject {
    // SAFETY: by the contract of the function.
    unsafe { object(context) }
}

impl ContextObject {
    /// Returns the number for `errno` if the device was removed.
    fn removal(&self, state: &State) -> Option<c_int> {
        state.devices[self.device].is_removed.then_some(libc::EIO)
    }
}

unsafe extern "C" fn get_device_list(count: *mut c_int) -> *mut *mut ibv_device {
    let listed = LISTED.with(|listed| listed.borrow().clone());
    let fabric: Arc<Fabric> = listed.expect("called by Library::devices");
    let state = fabric.lock();
    let present = state.devices.iter().filter(|device| !device.is_removed);
    let mut list: Vec<_> = present.map(|device| device.object.as_ptr()).collect();
    let length = c_int::try_from(list.len()).expect("few devices");
    // SAFETY: the caller passes a living variable.
    unsafe { count.write(length) };
    // The end of the list, by which it is freed.
    list.push(ptr::null_mut());
    Box::leak(list.into_boxed_slice()).as_mut_ptr()
}

/// Protects registered pages from children, unless some are registered already.
unsafe extern "C" fn fork_init() -> c_int {
    let listed = LISTED.with(|listed| listed.borrow().clone());
    let mut state = listed.as_ref().expect("called by the library").lock();
    if state.queues.has_regions() {
        return libc::EINVAL;
    }
    state.is_fork_protected = true;
    0
}

unsafe extern "C" fn is_fork_initialized() -> c_int {
    let listed = LISTED.with(|listed| listed.borrow().clone());
    let listed = listed.expect("called by the library");
    let state = listed.lock();
    if state.is_copied_on_fork { 2 } else { c_int::from(state.is_fork_protected) }
}

unsafe extern "C" fn free_device_list(list: *mut *mut ibv_device) {
    let mut length = 1;
    let mut entry = list;
    // SAFETY: the list ends with a null pointer, and `entry` does not go beyond it.
    while !unsafe { entry.read() }.is_null() {
        entry = entry.wrapping_add(1);
        length += 1;
    }
    // SAFETY: `get_device_list` leaked a boxed slice of this length.
    drop(unsafe { Box::from_raw(ptr::slice_from_raw_parts_mut(list, length)) });
}

unsafe extern "C" fn get_device_name(device: *mut ibv_device) -> *const c_char {
    // SAFETY: a device of a living list, whose name is never written.
    unsafe { (*device).name.as_ptr() }
}

unsafe extern "C" fn get_device_guid(device: *mut ibv_device) -> u64 {
    // SAFETY: a device of a living list.
    let device: &DeviceObject = unsafe { object(device) };
    (device.index as u64 + 1).to_be()
}

unsafe extern "C" fn open_device(device: *mut ibv_device) -> *mut ibv_context {
    // SAFETY: a device of a living list.
    let found: &DeviceObject = unsafe { object(device) };
    let fabric = found.fabric.upgrade().expect("the library keeps its fabric");
    let mut context = ContextObject::new(Arc::clone(&fabric), found.index, device);
    context.context.ops.post_send = Some(post_send);
    context.context.ops.poll_cq = Some(poll_cq);
    context.context.ops.req_notify_cq = Some(req_notify_cq);
    context.context.num_comp_vectors = VECTORS;
    let mut state = fabric.lock();
    if state.devices[found.index].is_removed {
        return refuse(libc::ENODEV);
    }
    let handle = NonNull::from(Box::leak(context));
    state.devices[found.index].contexts.push(ContextHandle(handle));
    handle.as_ptr().cast()
}

unsafe extern "C" fn close_device(context: *mut ibv_context) -> c_int {
    // SAFETY: a living context.
    let found = unsafe { of_context(context) };
    let handle = ContextHandle(NonNull::from(found));
    found.fabric.lock().devices[found.device].contexts.retain(|listed| *listed != handle);
    // SAFETY: the caller closes it once, and no report reaches it any more.
    unsafe { take::<ContextObject, _>(context) };
    0
}

unsafe extern "C" fn query_device(
    context: *mut ibv_context,
    result: *mut ibv_device_attr,
) -> c_int {
    // SAFETY: a living context.
    let found = unsafe { of_context(context) };
    let state = found.fabric.lock();
    if let Some(number) = found.removal(&state) {
        return number;
    }
    // SAFETY: the caller passes a living result.
    let attributes = unsafe { &mut *result };
    attributes.phys_port_cnt = 1;
    attributes.max_mr_size = state.devices[found.device].settings.region_bytes_max;
    attributes.max_mr = ENTRIES_MAX;
    attributes.max_cq = ENTRIES_MAX;
    attributes.max_cqe = ENTRIES_MAX;
    attributes.max_qp = ENTRIES_MAX;
    attributes.max_qp_wr = ENTRIES_MAX;
    attributes.max_sge = 1;
    attributes.max_qp_rd_atom = state.devices[found.device].settings.reads_max.into();
    attributes.max_qp_init_rd_atom = 16;
    0
}

unsafe extern "C" fn query_port(
    context: *mut ibv_context,
    port: u8,
    result: *mut ibv_port_attr,
) -> c_int {
    // SAFETY: a living context.
    let found = unsafe { of_context(context) };
    let state = found.fabric.lock();
    if let Some(number) = found.removal(&state) {
        return number;
    }
    if port != 1 {
        return libc::EINVAL;
    }
    // SAFETY: the caller passes a living result.
    let attributes = unsafe { &mut *result };
    attributes.state = if state.devices[found.device].is_link_up {
        ibv_port_state::IBV_PORT_ACTIVE
    } else {
        ibv_port_state::IBV_PORT_DOWN
    };
    attributes.active_mtu = 5; // 4096 bytes
    attributes.gid_tbl_len = ADDRESSES_MAX;
    attributes.lid = state.devices[found.device].lid;
    attributes.link_layer = 2; // Ethernet
    attributes.active_width = 2; // 4 lanes
    attributes.active_speed = 32; // 25 Gb/s each
    0
}

unsafe extern "C" fn query_gid(
    context: *mut ibv_context,
    port: u8,
    index: c_int,
    result: *mut ibv_gid,
) -> c_int {
    // SAFETY: a living context.
    let found = unsafe { of_context(context) };
    let state = found.fabric.lock();
    if let Some(number) = found.removal(&state) {
        return number;
    }
    if port != 1 || !(0..ADDRESSES_MAX).contains(&index) {
        return libc::EINVAL;
    }
    let gid = state.devices[found.device].address(index).unwrap_or(Gid([0; 16]));
    // SAFETY: the caller passes a living result.
    unsafe { result.write(ibv_gid { raw: gid.0 }) };
    0
}

unsafe extern "C" fn query_gid_ex(
    context: *mut ibv_context,
    port: u32,
    index: u32,
    result: *mut KindOfGid,
    _flags: u32,
    size: usize,
) -> c_int {
    // SAFETY: a living context.
    let found = unsafe { of_context(context) };
    let state = found.fabric.lock();
    let kind = state.devices[found.device].settings.gid_kind;
    if port != 1 || index >= ADDRESSES_MAX.cast_unsigned() || size != size_of::<KindOfGid>() {
        return libc::EINVAL;
    }
    // SAFETY: the caller passes a living result.
    unsafe { result.write(KindOfGid { index, port, kind, ..KindOfGid::default() }) };
    0
}

unsafe extern "C" fn get_async_event(
    context: *mut ibv_context,
    result: *mut ibv_async_event,
) -> c_int {
    // SAFETY: a living context.
    let found = unsafe { of_context(context) };
    let Some(number) = found.next_event() else { return -1 };
    // SAFETY: the caller passes a living result. The type of the event is an integer in C.
    unsafe { ptr::addr_of_mut!((*result).event_type).cast::<u32>().write(number) };
    // SAFETY: as above. All simulated events are of the only port or of the device.
    unsafe { (*result).element.port_num = 1 };
    0
}

unsafe extern "C" fn ack_async_event(_event: *mut ibv_async_event) {}

unsafe extern "C" fn alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    // SAFETY: a living context.
    let found = unsafe { of_context(context) };
    if let Some(number) = found.removal(&found.fabric.lock()) {
        return refuse(number);
    }
    give(Box::new(DomainObject { domain: ibv_pd { context, handle: 0 } }))
}

unsafe extern "C" fn dealloc_pd(domain: *mut ibv_pd) -> c_int {
    // SAFETY: a living domain, which the caller frees once.
    unsafe { take::<DomainObject, _>(domain) };
    0
}

unsafe extern "C" fn reg_mr(
    domain: *mut ibv_pd,
    address: *mut c_void,
    length: usize,
    access: c_int,
) -> *mut ibv_mr {
    let is_written = access & ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0.cast_signed() != 0;
    if !is_mapped(address, length) || !is_readable(address) || is_written && !is_writable(address) {
        return refuse(libc::EFAULT);
    }
    let bytes = RegionBytes::Mapped(address.expose_provenance() as u64);
    // SAFETY: a living domain.
    unsafe { register(domain, address, length, bytes, access) }
}

unsafe extern "C" fn reg_dmabuf_mr(
    domain: *mut ibv_pd,
    offset: u64,
    length: usize,
    address: u64,
    file: c_int,
    access: c_int,
) -> *mut ibv_mr {
    let Some(exported) = ExportedBytes::map(file, offset, length) else {
        return refuse(libc::EINVAL);
    };
    let address = ptr::with_exposed_provenance_mut(address as usize);
    let bytes = RegionBytes::Exported(Arc::new(exported));
    // SAFETY: a living domain.
    unsafe { register(domain, address, length, bytes, access) }
}

/// Registers bytes under an address.
///
/// # Safety
/// The domain lives.
unsafe fn register(
    domain: *mut ibv_pd,
    address: *mut c_void,
    length: usize,
    bytes: RegionBytes,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: a living domain.
    let context = unsafe { (*domain).context };
    // SAFETY: the context outlives its domain.
    let found = unsafe { of_context(context) };
    let mut state = found.fabric.lock();
    if let Some(number) = found.removal(&state) {
        return refuse(number);
    }
    let length_max = state.devices[found.device].settings.region_bytes_max;
    if length == 0 || length as u64 > length_max {
        return refuse(libc::EINVAL);
    }
    let access = ibv_access_flags(access.cast_unsigned());
    let allows = |flag: ibv_access_flags| access & flag == flag;
    let key = state.queues.add_region(RegionState {
        device: found.device,
        address: address.expose_provenance() as u64,
        bytes,
        length: length as u64,
        is_writable: allows(ibv_access_flags::IBV_ACCESS_LOCAL_WRITE),
        is_remote_readable: allows(ibv_access_flags::IBV_ACCESS_REMOTE_READ),
        is_remote_writable: allows(ibv_access_flags::IBV_ACCESS_REMOTE_WRITE),
    });
    let region =
        ibv_mr { context, pd: domain, addr: address, length, handle: 0, lkey: key, rkey: key };
    give(Box::new(RegionObject { region }))
}

/// Returns whether each page of a range is mapped.
fn is_mapped(address: *mut c_void, length: usize) -> bool {
    const PAGE_BYTES: usize = 4096;
    let begin = address.addr() / PAGE_BYTES * PAGE_BYTES;
    let pages = (address.addr() + length).div_ceil(PAGE_BYTES) - begin / PAGE_BYTES;
    let mut residency = vec![0; pages];
    let first = address.with_addr(begin);
    // SAFETY: the call reads no memory of the range; it writes one byte a page, for which there is room.
    unsafe { libc::mincore(first, pages * PAGE_BYTES, residency.as_mut_ptr()) == 0 }
}

/// Returns whether the byte at an address can be read: memory of a device is mapped without access.
fn is_readable(address: *mut c_void) -> bool {
    let mut byte = 0_u8;
    let into = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
    let from = libc::iovec { iov_base: address, iov_len: 1 };
    // SAFETY: the kernel checks the range that is read, and there is room for one byte.
    unsafe {
        libc::process_vm_readv(libc::getpid(), &raw const into, 1, &raw const from, 1, 0) == 1
    }
}

/// Returns whether the kernel lists the page of an address as writable.
fn is_writable(address: *mut c_void) -> bool {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let number = |text: &str| usize::from_str_radix(text, 16).unwrap_or(0);
    let holds = |line: &&str| {
        let range = line.split_once(' ').and_then(|(range, _)| range.split_once('-'));
        range.is_some_and(|(from, to)| (number(from)..number(to)).contains(&address.addr()))
    };
    let rights = maps.lines().find(holds).and_then(|line| line.split(' ').nth(1));
    rights.is_some_and(|rights| rights.as_bytes().get(1) == Some(&b'w'))
}

unsafe extern "C" fn dereg_mr(region: *mut ibv_mr) -> c_int {
    // SAFETY: a living region.
    let (context, key) = unsafe { ((*region).context, (*region).lkey) };
    // SAFETY: the context outlives its region.
    unsafe { of_context(context) }.fabric.lock().queues.remove_region(key);
    // SAFETY: the caller gives it back once.
    unsafe { take::<RegionObject, _>(region) };
    0
}

unsafe extern "C" fn create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel {
    // SAFETY: a living context.
    let found = unsafe { of_context(context) };
    if let Some(number) = found.removal(&found.fabric.lock()) {
        return refuse(number);
    }
    give(ChannelObject::new(context))
}

unsafe extern "C" fn destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int {
    // SAFETY: a living channel without queues, which the caller destroys once.
    unsafe { take::<ChannelObject, _>(channel) };
    0
}

unsafe extern "C" fn create_cq(
    context: *mut ibv_context,
    capacity: c_int,
    _user: *mut c_void,
    channel: *mut ibv_comp_channel,
    vector: c_int,
) -> *mut ibv_cq {
    // SAFETY: a living context.
    let found = unsafe { of_context(context) };
    let mut state = found.fabric.lock();
    if let Some(number) = found.removal(&state) {
        return refuse(number);
    }
    if !(1..=ENTRIES_MAX).contains(&capacity) || !(0..VECTORS).contains(&vector) {
        return refuse(libc::EINVAL);
    }
    let number = state.queues.add_completions(found.device);
    // SAFETY: integers, pointers, a mutex and a condition that nobody uses; zero is a value of each.
    let mut queue: ibv_cq = unsafe { mem::zeroed() };
    (queue.context, queue.channel, queue.cqe) = (context, channel, capacity);
    let fabric = Arc::clone(&found.fabric);
    let queue = NonNull::from(Box::leak(Box::new(CompletionsObject { queue, number, fabric })));
    if let Some(channel) = NonNull::new(channel.cast::<ChannelObject>()) {
        state.reporters.insert(number, Reporter { channel, queue });
    }
    queue.as_ptr().cast()
}

unsafe extern "C" fn destroy_cq(queue: *mut ibv_cq) -> c_int {
    // SAFETY: a living queue.
    let found: &CompletionsObject = unsafe { object(queue) };
    let mut state = found.fabric.lock();
    state.reporters.remove(&found.number);
    state.queues.remove_completions(found.number);
    drop(state);
    // SAFETY: the caller destroys it once.
    unsafe { take::<CompletionsObject, _>(queue) };
    0
}

unsafe extern "C" fn get_cq_event(
    channel: *mut ibv_comp_channel,
    queue: *mut *mut ibv_cq,
    user: *mut *mut c_void,
) -> c_int {
    // SAFETY: a living channel.
    let found: &ChannelObject = unsafe { object(channel) };
    let Some(event) = found.next_event() else { return -1 };
    // SAFETY: the caller passes two living variables.
    unsafe { queue.write(event) };
    // SAFETY: as above.
    unsafe { user.write(ptr::null_mut()) };
    0
}

unsafe extern "C" fn ack_cq_events(_queue: *mut ibv_cq, _count: c_uint) {}

unsafe extern "C" fn poll_cq(queue: *mut ibv_cq, count: c_int, results: *mut ibv_wc) -> c_int {
    // SAFETY: a living queue.
    let found: &CompletionsObject = unsafe { object(queue) };
    let mut state = found.fabric.lock();
    let mut polled = 0;
    while polled < count {
        let Some(entry) = state.queues.poll(found.number) else { break };
        // SAFETY: integers only, for which zero is a value.
        let mut result: ibv_wc = unsafe { mem::zeroed() };
        (result.wr_id, result.status, result.qp_num) = (entry.id, entry.status, entry.queue_pair);
        // SAFETY: the caller has room for `count` results.
        unsafe { results.add(polled as usize).write(result) };
        polled += 1;
    }
    polled
}

unsafe extern "C" fn req_notify_cq(queue: *mut ibv_cq, _solicited_only: c_int) -> c_int {
    // SAFETY: a living queue.
    let found: &CompletionsObject = unsafe { object(queue) };
    found.fabric.lock().queues.arm(found.number);
    0
}

unsafe extern "C" fn create_qp(domain: *mut ibv_pd, wanted: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    // SAFETY: a living domain.
    let context = unsafe { (*domain).context };
    // SAFETY: the context outlives its domain.
    let found = unsafe { of_context(context) };
    // SAFETY: the caller passes living attributes.
    let wanted = unsafe { &mut *wanted };
    let mut state = found.fabric.lock();
    if let Some(number) = found.removal(&state) {
        return refuse(number);
    }
    if wanted.cap.max_send_wr > ENTRIES_MAX.cast_unsigned() {
        return refuse(libc::EINVAL);
    }
    let inline_bytes_max = state.devices[found.device].settings.inline_bytes_max;
    if wanted.cap.max_inline_data > inline_bytes_max {
        return refuse(libc::EINVAL);
    }
    // Drivers grant what fits into their requests, also where less is wanted.
    wanted.cap.max_inline_data = inline_bytes_max.min(INLINE_BYTES_MAX as u32);
    // SAFETY: a living completion queue.
    let completions: &CompletionsObject = unsafe { object(wanted.send_cq) };
    let capacity = wanted.cap.max_send_wr;
    let entry = FakeQueuePair::new(found.device, completions.number, capacity);
    let number = state.queues.add_queue_pair(entry);
    // SAFETY: integers, pointers, a mutex and a condition that nobody uses; zero is a value of each.
    let mut queue_pair: ibv_qp = unsafe { mem::zeroed() };
    (queue_pair.context, queue_pair.pd, queue_pair.qp_num) = (context, domain, number);
    give(Box::new(QueuePairObject { queue_pair }))
}

unsafe extern "C" fn modify_qp(
    queue_pair: *mut ibv_qp,
    attributes: *mut ibv_qp_attr,
    chosen: c_int,
) -> c_int {
    // SAFETY: a living queue pair and living attributes.
    let (context, number, wanted) =
        unsafe { ((*queue_pair).context, (*queue_pair).qp_num, &*attributes) };
    // SAFETY: the context outlives its queue pair.
    let found = unsafe { of_context(context) };
    let mut state = found.fabric.lock();
    if let Some(number) = found.removal(&state) {
        return number;
    }
    let chosen = mask(chosen.cast_unsigned());
    let index = wanted.ah_attr.grh.sgid_index;
    let own = state.devices[found.device].address(index.into());
    let Some(entry) = state.queues.queue_pair(number) else { return libc::EINVAL };
    let is_next = match wanted.qp_state {
        ibv_qp_state::IBV_QPS_INIT => entry.state == ibv_qp_state::IBV_QPS_RESET,
        ibv_qp_state::IBV_QPS_RTR => entry.state == ibv_qp_state::IBV_QPS_INIT,
        ibv_qp_state::IBV_QPS_RTS => entry.state == ibv_qp_state::IBV_QPS_RTR,
        _ => true,
    };
    if !is_next {
        return libc::EINVAL;
    }
    if chosen & mask::IBV_QP_PORT == mask::IBV_QP_PORT && wanted.port_num != 1 {
        return libc::EINVAL;
    }
    if chosen & mask::IBV_QP_AV == mask::IBV_QP_AV {
        let Some(own) = own else { return libc::EINVAL };
        // SAFETY: sixteen bytes are the whole of the union.
        let gid = Gid(unsafe { wanted.ah_attr.grh.dgid.raw });
        (entry.gid, entry.gid_index) = (own, index);
        let (lid, number) = (wanted.ah_attr.dlid, wanted.dest_qp_num);
        entry.peer = Some(PeerState { gid, lid, number });
        (entry.sent, entry.received) = (0, 0);
    }
    if chosen & mask::IBV_QP_MAX_DEST_RD_ATOMIC == mask::IBV_QP_MAX_DEST_RD_ATOMIC {
        entry.incoming_reads = wanted.max_dest_rd_atomic;
    }
    if chosen & mask::IBV_QP_MAX_QP_RD_ATOMIC == mask::IBV_QP_MAX_QP_RD_ATOMIC {
        entry.outgoing_reads = wanted.max_rd_atomic;
    }
    if chosen & mask::IBV_QP_TIMEOUT == mask::IBV_QP_TIMEOUT {
        let once = Duration::from_nanos(4096 << wanted.timeout.min(31));
        entry.patience = once * (u32::from(wanted.retry_cnt) + 1);
    }
    state.queues.set_state(number, wanted.qp_state);
    state.progress();
    0
}

unsafe extern "C" fn query_qp(
    queue_pair: *mut ibv_qp,
    attributes: *mut ibv_qp_attr,
    _wanted: c_int,
    _initial: *mut ibv_qp_init_attr,
) -> c_int {
    // SAFETY: a living queue pair.
    let (context, number) = unsafe { ((*queue_pair).context, (*queue_pair).qp_num) };
    // SAFETY: the context outlives its queue pair.
    let found = unsafe { of_context(context) };
    let mut state = found.fabric.lock();
    if let Some(number) = found.removal(&state) {
        return number;
    }
    let Some(entry) = state.queues.queue_pair(number) else { return libc::EINVAL };
    // SAFETY: the caller passes a living result.
    unsafe { (*attributes).qp_state = entry.state };
    0
}

unsafe extern "C" fn destroy_qp(queue_pair: *mut ibv_qp) -> c_int {
    // SAFETY: a living queue pair.
    let (context, number) = unsafe { ((*queue_pair).context, (*queue_pair).qp_num) };
    // SAFETY: the context outlives its queue pair.
    unsafe { of_context(context) }.fabric.lock().queues.remove_queue_pair(number);
    // SAFETY: the caller destroys it once.
    unsafe { take::<QueuePairObject, _>(queue_pair) };
    0
}

unsafe extern "C" fn post_send(
    queue_pair: *mut ibv_qp,
    first: *mut ibv_send_wr,
    refused: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: a living queue pair.
    let (context, number) = unsafe { ((*queue_pair).context, (*queue_pair).qp_num) };
    // SAFETY: the context outlives its queue pair.
    let found = unsafe { of_context(context) };
    let mut state = found.fabric.lock();
    let mut entry = first;
    let mut code = 0;
    while !entry.is_null() {
        // SAFETY: the caller passes a linked list of living requests.
        let request = unsafe { &*entry };
        let posted = decode(request, |bytes| state.due(found.device, bytes));
        state.requests += 1;
        state.inline_requests += u64::from(posted.as_ref().is_some_and(|one| one.inline.is_some()));
        code = posted.map_or(libc::EINVAL, |posted| match state.queues.post(number, posted) {
            Ok(()) => 0,
            Err(number) => number,
        });
        if code != 0 {
            // SAFETY: the caller passes a living variable.
            unsafe { refused.write(entry) };
            break;
        }
        entry = request.next;
    }
    state.progress();
    code
}

/// Converts a request with at most one range, if it is one that the fabric carries out.
fn decode(request: &ibv_send_wr, due: impl FnOnce(u32) -> Duration) -> Option<Posted> {
    if !(0..=1).contains(&request.num_sge) {
        return None;
    }
    let operation = match request.opcode {
        ibv_wr_opcode::IBV_WR_RDMA_READ => Operation::Read,
        ibv_wr_opcode::IBV_WR_RDMA_WRITE => Operation::Write,
        _ => return None,
    };
    let has = |flag: ibv_send_flags| request.send_flags & flag.0 != 0;
    // SAFETY: a request with one range has a living one.
    let range = (request.num_sge == 1).then(|| unsafe { request.sg_list.read() });
    let range = range.unwrap_or(ibv_sge { addr: 0, length: 0, lkey: 0 });
    let local = Span { address: range.addr, length: range.length, key: range.lkey };
    let mut inline = None;
    if has(ibv_send_flags::IBV_SEND_INLINE) {
        let mut bytes = [0; INLINE_BYTES_MAX];
        let part = bytes.get_mut(..range.length as usize)?;
        let source = ptr::with_exposed_provenance::<u8>(range.addr as usize);
        // SAFETY: the caller of `submit` vouches for the local range during the call.
        unsafe { source.copy_to_nonoverlapping(part.as_mut_ptr(), part.len()) };
        inline = Some(bytes);
    }
    // SAFETY: the field of reads and writes.
    let remote = unsafe { request.wr.rdma };
    Some(Posted {
        id: request.wr_id,
        operation,
        is_signaled: has(ibv_send_flags::IBV_SEND_SIGNALED),
        local,
        remote: Span { address: remote.remote_addr, length: range.length, key: remote.rkey },
        due: due(range.length),
        inline,
    })
}
