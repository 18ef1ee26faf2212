//! What a rank has called. It travels with each frame of an operation, so that ranks that have called
//! different operations at one place notice it, and none of them computes with bytes of another one.

use std::fmt;

use mooncake_base::Error;

use crate::{operation_kind::OperationKind, reduce::Reduction};

/// Names of the types of elements, by their code. Those that can be reduced come first, in the order of
/// [`Dtype`](crate::Dtype).
pub const ELEMENTS: [&str; 21] = [
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "float32",
    "float64",
    "bool",
    "float16",
    "bfloat16",
    "complex64",
    "complex128",
    "uint16",
    "uint32",
    "uint64",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
];

/// Stands for no root, no reduction, and no type that has a code.
const NONE: u8 = u8::MAX;
/// Longer tensors are compared part by part only.
const LENGTH_MAX: u64 = (1 << 40) - 1;

/// A call: the kind of the operation, and what must be the same at all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Call {
    /// The place of the kind among all kinds, counted from 1; 0 if there is no call.
    kind: u8,
    elements: u8,
    how: u8,
    root: u8,
    /// Bytes of a rank; 0 where ranks may pass different numbers.
    length: u64,
}

impl Call {
    /// That of a frame that belongs to no operation.
    pub(crate) const NONE: Self =
        Self { kind: 0, elements: NONE, how: NONE, root: NONE, length: 0 };

    pub(crate) fn new(kind: OperationKind, elements: u8, length: usize) -> Self {
        let length = LENGTH_MAX.min(length as u64);
        Self { kind: kind as u8 + 1, elements, how: NONE, root: NONE, length }
    }

    pub(crate) fn with_reduction(self, how: Reduction) -> Self {
        Self { how: how as u8, ..self }
    }

    pub(crate) fn with_root(self, root: Option<usize>) -> Self {
        Self { root: root.map_or(NONE, |root| u8::try_from(root).unwrap_or(NONE)), ..self }
    }

    pub(crate) fn encode(self) -> [u8; 8] {
        let [kind, how] = [u64::from(self.kind), u64::from(self.how & 0xF)];
        let [elements, root] = [u64::from(self.elements), u64::from(self.root)];
        (kind | how << 4 | elements << 8 | root << 16 | self.length << 24).to_le_bytes()
    }

    pub(crate) fn decode(bytes: [u8; 8]) -> Self {
        let [first, elements, root, ..] = bytes;
        let how = if first >> 4 == 0xF { NONE } else { first >> 4 };
        let length = u64::from_le_bytes(bytes) >> 24;
        Self { kind: first & 0xF, elements, how, root, length }
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = usize::from(self.kind).checked_sub(1);
        let name = kind.and_then(|kind| OperationKind::ALL.get(kind)).map(|kind| kind.name());
        write!(f, "{}(", name.unwrap_or("none"))?;
        let how = Reduction::from_code(self.how.into()).ok().map(Reduction::name);
        let elements = ELEMENTS.get(usize::from(self.elements)).copied();
        let mut words: Vec<String> =
            [elements, how].into_iter().flatten().map(String::from).collect();
        if self.root != NONE {
            words.push(format!("root {}", self.root));
        }
        if self.length > 0 {
            words.push(format!("{} bytes", self.length));
        }
        write!(f, "{})", words.join(", "))
    }
}

/// Returns the error of two ranks, each with its call, that have called different operations.
pub(crate) fn differ(one: (usize, Call), other: (usize, Call)) -> Error {
    let is_length = Call { length: 0, ..one.1 } == Call { length: 0, ..other.1 };
    let text = if is_length {
        "the tensors of the ranks differ in size"
    } else {
        "the ranks have called different operations"
    };
    let (first, second) = if one.0 < other.0 { (one, other) } else { (other, one) };
    let error = Error::invalid(text).with("rank", first.0).with("call", first.1);
    error.with("other_rank", second.0).with("other_call", second.1)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test panics where a step fails")]
mod tests {
    use super::*;
    use crate::reduce::Dtype;

    #[test]
    fn call_survives_the_wire() {
        let reduce = Call::new(OperationKind::Reduce, 5, 1 << 39)
            .with_reduction(Reduction::BitXor)
            .with_root(Some(63));
        let barrier = Call::new(OperationKind::Barrier, NONE, 0);
        for call in [reduce, barrier, Call::NONE, Call::new(OperationKind::Gather, 20, 1)] {
            assert_eq!(Call::decode(call.encode()), call);
        }
        assert_eq!(Call::new(OperationKind::Gather, 1, usize::MAX).length, LENGTH_MAX);
    }

    #[test]
    fn error_names_both_calls_and_both_ranks() {
        let sum = Call::new(OperationKind::AllReduce, 5, 8).with_reduction(Reduction::Sum);
        let broadcast = Call::new(OperationKind::Broadcast, 4, 16).with_root(Some(1));
        assert_eq!(
            differ((2, broadcast), (0, sum)).to_string(),
            "the ranks have called different operations rank=0 call=allreduce(float32, sum, 8 bytes) \
             other_rank=2 other_call=broadcast(int64, root 1, 16 bytes)"
        );
        let longer = Call { length: 16, ..sum };
        assert!(differ((0, sum), (1, longer)).to_string().contains("differ in size"));
    }

    #[test]
    fn types_that_can_be_reduced_have_the_code_of_their_name() {
        for (code, name) in (0..15).zip(ELEMENTS) {
            let short = name.replace("uint", "u").replace("int", "i");
            let short = short.replace("bfloat", "bf").replace("float", "f");
            let dtype = Dtype::from_code(code).unwrap();
            assert_eq!(format!("{dtype:?}").to_lowercase(), short);
        }
        assert!(Dtype::from_code(15).is_err());
    }
}
