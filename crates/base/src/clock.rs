//! Moments and clocks: time is monotonic and continues during suspend.

use std::{fmt, ops, sync::Arc, time::Duration};

/// A point in time, counted from the boot of the machine. Meaningless on another machine.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Moment(Duration);

impl Moment {
    /// Returns the moment at this duration after boot.
    pub const fn from_boot(since: Duration) -> Self {
        Self(since)
    }

    /// Returns the duration since boot.
    pub const fn since_boot(self) -> Duration {
        self.0
    }

    /// Returns the duration since `earlier`; zero if `earlier` is later.
    pub fn since(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }

    /// Returns the duration until this moment; zero if it has passed.
    pub fn left(self, now: Self) -> Duration {
        self.since(now)
    }

    /// Returns whether `now` is at or after this moment.
    pub fn has_passed(self, now: Self) -> bool {
        self <= now
    }
}

impl ops::Add<Duration> for Moment {
    type Output = Self;

    fn add(self, wait: Duration) -> Self {
        Self(self.0.saturating_add(wait))
    }
}

impl fmt::Debug for Moment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "+{:?}", self.0)
    }
}

/// A source of the current time. Rules take a [`Moment`]; only drivers hold a clock.
pub trait Clock: fmt::Debug + Send + Sync {
    /// Returns the current moment.
    fn now(&self) -> Moment;
}

/// The machine's clock (`CLOCK_BOOTTIME`).
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemClock;

impl SystemClock {
    /// Returns the clock as a shared trait object.
    pub fn shared() -> Arc<dyn Clock> {
        Arc::new(Self)
    }
}

impl Clock for SystemClock {
    #[allow(unsafe_code, reason = "the one clock that counts suspend is reached only through libc")]
    fn now(&self) -> Moment {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the pointer is to a live local that the call fills; the call keeps no reference.
        let failed = unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &raw mut time) };
        assert_eq!(failed, 0, "every Linux kernel we support has CLOCK_BOOTTIME");
        Moment(Duration::new(time.tv_sec as u64, time.tv_nsec as u32))
    }
}

/// A clock that moves only when a test advances it.
#[cfg(feature = "test-util")]
#[derive(Debug, Default)]
pub struct ManualClock(std::sync::atomic::AtomicU64);

#[cfg(feature = "test-util")]
impl ManualClock {
    /// Advances the clock.
    pub fn advance(&self, by: Duration) {
        let nanos = u64::try_from(by.as_nanos()).expect("tests do not wait for centuries");
        self.0.fetch_add(nanos, std::sync::atomic::Ordering::SeqCst);
    }
}

#[cfg(feature = "test-util")]
impl Clock for ManualClock {
    fn now(&self) -> Moment {
        Moment(Duration::from_nanos(self.0.load(std::sync::atomic::Ordering::SeqCst)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clock_is_monotonic() {
        let first = SystemClock.now();
        let second = SystemClock.now();
        assert!(second >= first);
        assert!((first + Duration::from_secs(1)).left(first) == Duration::from_secs(1));
        assert_eq!(first.since(first + Duration::from_secs(1)), Duration::ZERO);
    }
}
