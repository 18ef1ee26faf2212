//! The process and its machine, as the kernel shows them: forks, CPUs, memory limits, scheduling
//! of threads, and blocking sockets with deadlines.
//!
//! The crate knows no runtime and no protocol.
//!
//! In reading order: [`fork`] (resources that a forked child must not touch), [`cpu`] (the number of
//! CPUs), [`spin_wait`] (busy-polling before a thread sleeps), [`thread`] (niceness and preemptions),
//! [`memory`] (pages and the memory that is available), [`process`](mod@process) (what the process uses), [`port_holder`](mod@port_holder) (who listens at a port),
//! [`rlimit`] (the limit of open files),
//! [`dial`](mod@dial) and [`deadline_stream`] (connections with a deadline), [`acceptor`] (connections of
//! listeners, bounded in number), [`dedicated_thread`] (connections served by a thread of their own),
//! [`threads`] (the threads of an owner), [`call_limit`] (the deadline of the call that a
//! thread carries out, and interruptions of it).
#![warn(missing_docs)]

pub mod acceptor;
pub mod call_limit;
pub mod cpu;
pub mod deadline_stream;
pub mod dedicated_thread;
pub mod dial;
pub mod fork;
pub mod memory;
pub mod port_holder;
pub mod process;
pub mod rlimit;
pub mod spin_wait;
pub mod thread;
pub mod threads;

pub use cpu::cpu_count;
pub use deadline_stream::DeadlineStream;
pub use dial::dial;
pub use port_holder::port_holder;
