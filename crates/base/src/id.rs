//! Ids as newtypes. No id is a bare integer or a string anywhere in our code.

use std::fmt;

/// Declares a 128-bit id that its owner picks at random.
///
/// A macro because several types need the same ten functions and must not be mixed up.
macro_rules! random_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(u128);

        impl $name {
            /// Creates a new, globally unique id.
            ///
            /// # Panics
            /// If the system has no random source, because ids would collide.
            pub fn random() -> Self {
                let mut bytes = [0; 16];
                getrandom::fill(&mut bytes).expect("the system has a random source");
                Self(u128::from_le_bytes(bytes))
            }

            /// Creates the id with these bits, read from a message, a log or a test.
            pub const fn from_bits(bits: u128) -> Self {
                Self(bits)
            }

            /// Returns the bits.
            pub const fn bits(self) -> u128 {
                self.0
            }

            /// Encodes the id for the wire.
            pub const fn to_bytes(self) -> [u8; 16] {
                self.0.to_le_bytes()
            }

            /// Decodes an id from the wire; `None` unless there are 16 bytes.
            pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
                Some(Self(u128::from_le_bytes(bytes.try_into().ok()?)))
            }

            /// Parses the printed form, `first-second`.
            pub fn parse(text: &str) -> Option<Self> {
                let (first, second) = text.split_once('-')?;
                let (first, second): (u64, u64) = (first.parse().ok()?, second.parse().ok()?);
                Some(Self(u128::from(first) << 64 | u128::from(second)))
            }

            /// Returns the two halves of the printed form.
            pub const fn halves(self) -> (u64, u64) {
                ((self.0 >> 64) as u64, self.0 as u64)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let (first, second) = self.halves();
                write!(f, "{first}-{second}")
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({})"), self)
            }
        }
    };
}

random_id! {
    /// The id of a client of the master: one store handle in one process.
    ClientId
}
random_id! {
    /// The id of a segment: memory (or disk) that a client lends to the pool.
    SegmentId
}
random_id! {
    /// The id of one transfer engine in one process. A restarted process has another.
    EngineId
}

/// The half of an engine's id that the ids of its segments begin with. Another engine that is reached
/// at the same address has another mark.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct EngineMark(u64);

impl EngineId {
    /// Returns the mark of the engine.
    pub const fn mark(self) -> EngineMark {
        EngineMark(self.halves().0)
    }
}

impl SegmentId {
    /// Creates a new id for a segment in the memory of this engine.
    ///
    /// # Panics
    /// If the system has no random source, because ids would collide.
    pub fn of_engine(engine: EngineId) -> Self {
        let (mark, (_, rest)) = (engine.halves().0, Self::random().halves());
        Self(u128::from(mark) << 64 | u128::from(rest))
    }

    /// Returns the mark of the engine whose memory the segment is, if it was made by
    /// [`SegmentId::of_engine`].
    pub const fn engine_mark(self) -> EngineMark {
        EngineMark(self.halves().0)
    }
}

impl fmt::Display for EngineMark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

random_id! {
    /// The id of a task: a copy or move of an object that a client executes for the master.
    TaskId
}
random_id! {
    /// The id of a drain job.
    JobId
}

/// Declares a counter value that its owner increments and never reuses.
macro_rules! counted_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(pub u64);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

counted_id! {
    /// The version of an object; a later put of the same key has a higher one.
    Version
}
counted_id! {
    /// The id of one copy of a version of an object. Copies of other versions may have the same id.
    ReplicaId
}
counted_id! {
    /// How often the owner of a segment recreated its memory under the same id.
    Incarnation
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_round_trip_through_bytes_and_text() {
        let id = SegmentId::random();
        assert_eq!(SegmentId::from_bytes(&id.to_bytes()), Some(id));
        assert_eq!(SegmentId::parse(&id.to_string()), Some(id));
        assert_ne!(SegmentId::random(), id);
    }

    #[test]
    fn ids_of_segments_carry_the_mark_of_their_engine() {
        let engine = EngineId::random();
        let segments = [(); 2].map(|()| SegmentId::of_engine(engine));
        assert_ne!(segments[0], segments[1]);
        assert_eq!(segments.map(SegmentId::engine_mark), [engine.mark(); 2]);
        assert_ne!(EngineId::random().mark(), engine.mark());
    }

    #[test]
    fn rejects_malformed_ids() {
        assert_eq!(SegmentId::from_bytes(&[1, 2, 3]), None);
        for text in ["", "1", "-", "1-x", "1-2-3", "-1-2", "99999999999999999999-1"] {
            assert_eq!(ClientId::parse(text), None, "{text:?}");
        }
    }
}
