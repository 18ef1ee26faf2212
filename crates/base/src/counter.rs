//! Counters, and the macro that declares them: one row has the field, its meaning, and the name
//! under which it is exported.

use std::sync::atomic::{AtomicU64, Ordering};

/// A number that any threads add to.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds a count.
    #[inline]
    pub fn add(&self, count: u64) {
        self.0.fetch_add(count, Ordering::Relaxed);
    }

    /// Adds a count that is often zero: an atomic addition costs more than the comparison.
    #[inline]
    pub fn add_nonzero(&self, count: u64) {
        if count > 0 {
            self.add(count);
        }
    }

    /// Adds one.
    #[inline]
    pub fn increment(&self) {
        self.add(1);
    }

    /// Takes back what was added.
    #[inline]
    pub fn subtract(&self, count: u64) {
        self.0.fetch_sub(count, Ordering::Relaxed);
    }

    /// Returns the number.
    #[inline]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Declares counters: the struct that threads count in, the struct of their values at one moment,
/// and the metrics that show such values.
///
/// A row is a field of both structs. Its first line of documentation is the help of its metric; the
/// kind and the name of the metric follow, and a label that the metric always has. Without them the
/// counter is not exported. Rows stand in tables, each of which is an associated constant of the
/// values, in the order of the rows. A row that is no [`Counter`] names the type that records and
/// the type that its `snapshot` returns. Fields in the braces of the values are set by others;
/// `snapshot` leaves them at their defaults. Without the first struct, others set all values.
///
/// ```
/// use mooncake_base::{counters, exposition::Exposition, histogram::{Histogram, Latency}};
///
/// counters! {
///     /// Counts the reads of a peer.
///     struct ReadCounters;
///     /// What was read from a peer.
///     pub struct Reads {
///         /// Name of the peer.
///         pub peer: String,
///     }
///     METRICS {
///         /// Reads that succeeded.
///         done = counter "reads_total" { outcome = "done" },
///         /// Reads that failed.
///         failed = counter "reads_total" { outcome = "failed" },
///         /// Bytes that were read. This line is the help, but the next is not.
///         /// A part counts, too.
///         bytes = counter "read_bytes_total",
///         /// Duration of reads.
///         latency: Histogram => Latency,
///     }
/// }
///
/// let counters = ReadCounters::default();
/// counters.done.increment();
/// counters.bytes.add(10);
/// let reads = Reads { peer: "a".to_owned(), ..counters.snapshot() };
/// assert_eq!((reads.done, reads.failed, reads.bytes, reads.latency.count()), (1, 0, 10, 0));
/// let mut out = Exposition::default();
/// out.rows("my_", Reads::METRICS, &[(vec![("peer", reads.peer.as_str())], &reads)]);
/// assert!(out.text().contains("my_reads_total{peer=\"a\",outcome=\"done\"} 1\n"));
/// ```
#[macro_export]
macro_rules! counters {
    (@recorded) => { $crate::counter::Counter };
    (@recorded $Recorded:ty) => { $Recorded };
    (@value) => { u64 };
    (@value $Value:ty) => { $Value };
    (@read $counter:expr) => { $counter.get() };
    (@read $counter:expr, $Value:ty) => { $counter.snapshot() };
    (
        $(#[$counters_attribute:meta])*
        $counters_visibility:vis struct $Counters:ident;
        $(#[$attribute:meta])*
        $visibility:vis struct $Values:ident { $($others:tt)* }
        $($Table:ident { $(
            #[doc = $help:literal]
            $(#[doc = $more:literal])*
            $field:ident $(: $Recorded:ty => $Value:ty)?
            $(= $kind:ident $name:literal $({ $label:ident = $text:literal })?)?
        ,)* })+
    ) => {
        $(#[$counters_attribute])*
        #[derive(Debug, Default)]
        $counters_visibility struct $Counters {
            $($(
                #[doc = $help]
                $(#[doc = $more])*
                $counters_visibility $field: $crate::counters!(@recorded $($Recorded)?),
            )*)+
        }

        impl $Counters {
            /// Returns the present values.
            #[allow(clippy::needless_update, reason = "not all values have other fields")]
            $counters_visibility fn snapshot(&self) -> $Values {
                $Values {
                    $($($field: $crate::counters!(@read self.$field $(, $Value)?),)*)+
                    ..$Values::default()
                }
            }
        }

        $crate::counters! {
            $(#[$attribute])*
            $visibility struct $Values { $($others)* }
            $($Table { $(
                #[doc = $help]
                $(#[doc = $more])*
                $field $(: $Recorded => $Value)?
                $(= $kind $name $({ $label = $text })?)?
            ,)* })+
        }
    };
    (
        $(#[$attribute:meta])*
        $visibility:vis struct $Values:ident { $($others:tt)* }
        $($Table:ident { $(
            #[doc = $help:literal]
            $(#[doc = $more:literal])*
            $field:ident $(: $Recorded:ty => $Value:ty)?
            $(= $kind:ident $name:literal $({ $label:ident = $text:literal })?)?
        ,)* })+
    ) => {
        $(#[$attribute])*
        #[derive(Debug, Clone, PartialEq, Eq, Default)]
        $visibility struct $Values {
            $($others)*
            $($(
                #[doc = $help]
                $(#[doc = $more])*
                $visibility $field: $crate::counters!(@value $($Value)?),
            )*)+
        }

        impl $Values { $(
            /// The metrics that show these values.
            #[allow(dead_code, reason = "not all values are exported")]
            pub(crate) const $Table: &'static [$crate::exposition::Metric<Self>] = &[$($(
                $crate::exposition::Metric::$kind(
                    $name,
                    $help.trim_ascii_start(),
                    |values: &Self| values.$field,
                )$(.labelled(stringify!($label), $text))?,
            )?)*];
        )+ }
    };
}

#[cfg(test)]
mod tests {
    use crate::{
        exposition::{Exposition, Metric},
        histogram::{Histogram, Latency},
    };

    counters! {
        /// Counts what a test does.
        struct StepCounters;
        /// What a test did.
        struct Steps {
            /// Set by somebody else.
            name: &'static str,
        }
        FIRST {
            /// Steps taken.
            /// This line is no help.
            taken = counter "taken_total",
            /// Steps that are not exported.
            hidden,
            /// Steps left.
            left = gauge "left" { side = "right" },
        }
        SECOND {
            /// Bytes that steps took.
            bytes = counter "bytes_total",
            /// Duration of steps.
            latency: Histogram => Latency,
        }
    }

    #[test]
    fn snapshot_has_what_was_counted() {
        let counters = StepCounters::default();
        counters.taken.increment();
        counters.taken.add(2);
        counters.hidden.add_nonzero(0);
        counters.left.add(5);
        counters.left.subtract(1);
        counters.latency.record(std::time::Duration::from_micros(3));
        let steps = counters.snapshot();
        assert_eq!((steps.taken, steps.hidden, steps.left, steps.bytes), (3, 0, 4, 0));
        assert_eq!((steps.latency.count(), steps.name), (1, ""));
    }

    #[test]
    fn tables_have_the_exported_rows_in_order() {
        let names = |table: &[Metric<Steps>]| table.iter().map(|it| it.name).collect::<Vec<_>>();
        assert_eq!(names(Steps::FIRST), ["taken_total", "left"]);
        assert_eq!(names(Steps::SECOND), ["bytes_total"]);
        let mut out = Exposition::default();
        out.row("a_", Steps::FIRST, &Steps { taken: 7, ..Steps::default() });
        assert_eq!(
            out.text(),
            "# HELP a_taken_total Steps taken.\n# TYPE a_taken_total counter\na_taken_total 7\n\
             # HELP a_left Steps left.\n# TYPE a_left gauge\na_left{side=\"right\"} 0\n"
        );
    }
}
