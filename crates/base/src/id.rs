//! Identities. None of them is a bare integer or a string anywhere in our code.

use std::fmt;

/// Declares a 128-bit identity that its owner makes at random.
///
/// A macro because three types need the same ten functions and must not be mixed up.
macro_rules! random_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(u128);

        impl $name {
            /// A new one that nobody else has.
            ///
            /// # Panics
            /// If the system has no random source, without which nothing here is safe.
            pub fn random() -> Self {
                let mut bytes = [0; 16];
                getrandom::fill(&mut bytes).expect("the system has a random source");
                Self(u128::from_le_bytes(bytes))
            }

            /// The one with these bits: from a wire, a log or a test.
            pub const fn from_bits(bits: u128) -> Self {
                Self(bits)
            }

            /// Its bits.
            pub const fn bits(self) -> u128 {
                self.0
            }

            /// As it stands on the wire.
            pub const fn to_bytes(self) -> [u8; 16] {
                self.0.to_le_bytes()
            }

            /// From the wire; `None` unless there are 16 bytes.
            pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
                Some(Self(u128::from_le_bytes(bytes.try_into().ok()?)))
            }

            /// From its printed form, `first-second`.
            pub fn parse(text: &str) -> Option<Self> {
                let (first, second) = text.split_once('-')?;
                let (first, second): (u64, u64) = (first.parse().ok()?, second.parse().ok()?);
                Some(Self(u128::from(first) << 64 | u128::from(second)))
            }

            /// The two halves of the printed form.
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
    /// A client of the master: one store handle in one process.
    ClientId
}
random_id! {
    /// A piece of memory (or disk) that a client lends to the pool.
    SegmentId
}
random_id! {
    /// One transfer engine in one process. A restarted process has another.
    EngineId
}

random_id! {
    /// A copy or a move of an object that a client carries out for the master.
    TaskId
}
random_id! {
    /// A drain of segments.
    JobId
}

/// Declares a number that its maker counts up and never reuses.
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
    /// One life of an object under a key; a later put of the same key has a higher one.
    Version
}
counted_id! {
    /// One copy of an object, unique within a master's life.
    ReplicaId
}
counted_id! {
    /// How often the owner of a segment made its memory anew under the same id.
    Incarnation
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_survives_wire_and_print() {
        let id = SegmentId::random();
        assert_eq!(SegmentId::from_bytes(&id.to_bytes()), Some(id));
        assert_eq!(SegmentId::parse(&id.to_string()), Some(id));
        assert_ne!(SegmentId::random(), id);
    }

    #[test]
    fn garbage_is_no_id() {
        assert_eq!(SegmentId::from_bytes(&[1, 2, 3]), None);
        for text in ["", "1", "-", "1-x", "1-2-3", "-1-2", "99999999999999999999-1"] {
            assert_eq!(ClientId::parse(text), None, "{text:?}");
        }
    }
}
