//! Scheduling of the calling thread: its niceness and its preemptions.

use rustix::{process::setpriority_process, thread::gettid};

/// Sets the niceness of the calling thread. Where that is not permitted, the niceness stays.
pub fn set_niceness(niceness: i32) {
    // Linux takes the id of a thread here, and changes this thread only.
    let _ = setpriority_process(Some(gettid()), niceness);
}

/// Returns whether the calling thread is the main thread of the process.
pub fn is_main() -> bool {
    gettid() == rustix::process::getpid()
}

/// Returns the number of involuntary context switches of the calling thread.
pub fn preemption_count() -> i64 {
    // SAFETY: plain numbers, for which zero is valid.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the call fills a live local; if it failed, which it cannot, the zeros would stay.
    unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) };
    usage.ru_nivcsw
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_threads_are_not_the_main_thread() {
        // The harness runs tests on threads of their own.
        assert!(!is_main());
    }

    #[test]
    fn niceness_changes_one_thread_only() {
        let own = || rustix::process::getpriority_process(Some(gettid())).unwrap();
        let before = own();
        let inside = std::thread::spawn(move || {
            set_niceness(before + 1);
            own()
        });
        assert_eq!(inside.join().unwrap(), (before + 1).min(19));
        assert_eq!(own(), before);
    }
}
