//! Reductions of arrays of numbers, over bytes in native order.

use mooncake_base::{Error, Result};

/// The type of the elements of a reduction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are those of the types")]
pub enum Dtype {
    U8,
    I8,
    I16,
    I32,
    I64,
    F32,
    F64,
    Bool,
    F16,
    Bf16,
    Complex64,
    Complex128,
    U16,
    U32,
    U64,
}

impl Dtype {
    const ALL: [Self; 15] = [
        Self::U8,
        Self::I8,
        Self::I16,
        Self::I32,
        Self::I64,
        Self::F32,
        Self::F64,
        Self::Bool,
        Self::F16,
        Self::Bf16,
        Self::Complex64,
        Self::Complex128,
        Self::U16,
        Self::U32,
        Self::U64,
    ];

    /// Returns the type with this code.
    ///
    /// # Errors
    /// There is none.
    pub fn from_code(code: u32) -> Result<Self> {
        let index = usize::try_from(code).unwrap_or(usize::MAX);
        let missing = || Error::invalid("unknown type of elements").with("code", code);
        Self::ALL.get(index).copied().ok_or_else(missing)
    }

    /// Returns the size of one element in bytes.
    pub fn size(self) -> usize {
        match self {
            Self::U8 | Self::I8 | Self::Bool => 1,
            Self::I16 | Self::U16 | Self::F16 | Self::Bf16 => 2,
            Self::I32 | Self::U32 | Self::F32 => 4,
            Self::I64 | Self::U64 | Self::F64 | Self::Complex64 => 8,
            Self::Complex128 => 16,
        }
    }
}

/// How the elements of two arrays become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are those of the operations")]
pub enum Reduction {
    Sum,
    Average,
    Product,
    Min,
    Max,
    BitAnd,
    BitOr,
    BitXor,
}

impl Reduction {
    const ALL: [Self; 8] = [
        Self::Sum,
        Self::Average,
        Self::Product,
        Self::Min,
        Self::Max,
        Self::BitAnd,
        Self::BitOr,
        Self::BitXor,
    ];

    /// Returns the reduction with this code.
    ///
    /// # Errors
    /// There is none.
    pub fn from_code(code: u32) -> Result<Self> {
        let index = usize::try_from(code).unwrap_or(usize::MAX);
        let missing = || Error::invalid("unknown reduction").with("code", code);
        Self::ALL.get(index).copied().ok_or_else(missing)
    }

    /// Returns the name of the reduction.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Sum => "sum",
            Self::Average => "average",
            Self::Product => "product",
            Self::Min => "min",
            Self::Max => "max",
            Self::BitAnd => "bitwise and",
            Self::BitOr => "bitwise or",
            Self::BitXor => "bitwise xor",
        }
    }
}

/// Reduces `other` into `sum`, element by element. Bytes past the shorter one stay as they are.
///
/// # Errors
/// The reduction is not defined for the type.
pub(crate) fn reduce_into(
    sum: &mut [u8],
    other: &[u8],
    dtype: Dtype,
    how: Reduction,
) -> Result<()> {
    match dtype {
        Dtype::U8 => integer::<1, u8>(sum, other, how),
        Dtype::I8 => integer::<1, i8>(sum, other, how),
        Dtype::I16 => integer::<2, i16>(sum, other, how),
        Dtype::I32 => integer::<4, i32>(sum, other, how),
        Dtype::I64 => integer::<8, i64>(sum, other, how),
        Dtype::U16 => integer::<2, u16>(sum, other, how),
        Dtype::U32 => integer::<4, u32>(sum, other, how),
        Dtype::U64 => integer::<8, u64>(sum, other, how),
        Dtype::Bool => boolean(sum, other, how),
        Dtype::F32 => float::<4, f32>(sum, other, how),
        Dtype::F64 => float::<8, f64>(sum, other, how),
        Dtype::F16 => float::<2, F16>(sum, other, how),
        Dtype::Bf16 => float::<2, Bf16>(sum, other, how),
        Dtype::Complex64 => complex::<8, 4, f32>(sum, other, how),
        Dtype::Complex128 => complex::<16, 8, f64>(sum, other, how),
    }
    .ok_or_else(|| undefined(dtype, how))
}

/// Divides each element by the number of arrays that were added.
///
/// # Errors
/// The average is not defined for the type.
pub(crate) fn divide(sum: &mut [u8], dtype: Dtype, by: usize) -> Result<()> {
    let by = by as f64;
    match dtype {
        Dtype::F32 | Dtype::Complex64 => scale::<4, f32>(sum, by),
        Dtype::F64 | Dtype::Complex128 => scale::<8, f64>(sum, by),
        Dtype::F16 => scale::<2, F16>(sum, by),
        Dtype::Bf16 => scale::<2, Bf16>(sum, by),
        Dtype::U8
        | Dtype::I8
        | Dtype::I16
        | Dtype::I32
        | Dtype::I64
        | Dtype::U16
        | Dtype::U32
        | Dtype::U64
        | Dtype::Bool => {
            return Err(undefined(dtype, Reduction::Average));
        }
    }
    Ok(())
}

fn undefined(dtype: Dtype, how: Reduction) -> Error {
    Error::invalid("the reduction is not defined for the type")
        .with("reduction", format!("{how:?}"))
        .with("type", format!("{dtype:?}"))
}

/// An element of `N` bytes in native order.
trait Element<const N: usize>: Copy {
    fn read(bytes: [u8; N]) -> Self;
    fn bytes(self) -> [u8; N];
}

trait Integer {
    fn add(self, other: Self) -> Self;
    fn multiply(self, other: Self) -> Self;
}

trait Float {
    fn wide(self) -> f64;
    fn narrow(value: f64) -> Self;
}

macro_rules! number {
    ($($kind:ty: $size:literal),*) => {$(
        impl Element<$size> for $kind {
            fn read(bytes: [u8; $size]) -> Self {
                Self::from_ne_bytes(bytes)
            }

            fn bytes(self) -> [u8; $size] {
                self.to_ne_bytes()
            }
        }
    )*};
}
number!(u8: 1, i8: 1, i16: 2, i32: 4, i64: 8, u16: 2, u32: 4, u64: 8, f32: 4, f64: 8);

macro_rules! wrapping {
    ($($kind:ty),*) => {$(
        impl Integer for $kind {
            fn add(self, other: Self) -> Self {
                self.wrapping_add(other)
            }

            fn multiply(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }
        }
    )*};
}
wrapping!(u8, i8, i16, i32, i64, u16, u32, u64);

/// Applies `f` to each pair of elements. The compiler vectorizes it for each `f`.
fn each<const N: usize, T: Element<N>>(sum: &mut [u8], other: &[u8], f: impl Fn(T, T) -> T) {
    let (sums, _) = sum.as_chunks_mut::<N>();
    let (others, _) = other.as_chunks::<N>();
    for (sum, other) in sums.iter_mut().zip(others) {
        *sum = f(T::read(*sum), T::read(*other)).bytes();
    }
}

fn integer<const N: usize, T>(sum: &mut [u8], other: &[u8], how: Reduction) -> Option<()>
where
    T: Element<N> + Integer + Ord,
{
    match how {
        Reduction::Sum => each::<N, T>(sum, other, Integer::add),
        Reduction::Product => each::<N, T>(sum, other, Integer::multiply),
        Reduction::Min => each::<N, T>(sum, other, Ord::min),
        Reduction::Max => each::<N, T>(sum, other, Ord::max),
        Reduction::BitAnd => each::<1, u8>(sum, other, |a, b| a & b),
        Reduction::BitOr => each::<1, u8>(sum, other, |a, b| a | b),
        Reduction::BitXor => each::<1, u8>(sum, other, |a, b| a ^ b),
        Reduction::Average => return None,
    }
    Some(())
}

/// Sums and maxima of truth values are "any", products and minima "all".
fn boolean(sum: &mut [u8], other: &[u8], how: Reduction) -> Option<()> {
    match how {
        Reduction::Sum | Reduction::Max | Reduction::BitOr => {
            each::<1, u8>(sum, other, |a, b| u8::from((a | b) != 0));
        }
        Reduction::Product | Reduction::Min | Reduction::BitAnd => {
            each::<1, u8>(sum, other, |a, b| u8::from(a != 0 && b != 0));
        }
        Reduction::BitXor => each::<1, u8>(sum, other, |a, b| u8::from((a != 0) != (b != 0))),
        Reduction::Average => return None,
    }
    Some(())
}

fn float<const N: usize, T>(sum: &mut [u8], other: &[u8], how: Reduction) -> Option<()>
where
    T: Element<N> + Arithmetic,
{
    match how {
        Reduction::Sum | Reduction::Average => each::<N, T>(sum, other, Arithmetic::plus),
        Reduction::Product => each::<N, T>(sum, other, Arithmetic::times),
        Reduction::Min => each::<N, T>(sum, other, Arithmetic::least),
        Reduction::Max => each::<N, T>(sum, other, Arithmetic::greatest),
        Reduction::BitAnd | Reduction::BitOr | Reduction::BitXor => return None,
    }
    Some(())
}

/// Arithmetic of a floating-point type. A NaN stays one in minima and maxima too.
trait Arithmetic: Copy {
    fn plus(self, other: Self) -> Self;
    fn times(self, other: Self) -> Self;
    fn least(self, other: Self) -> Self;
    fn greatest(self, other: Self) -> Self;
}

macro_rules! arithmetic {
    ($($kind:ty),*) => {$(
        impl Arithmetic for $kind {
            fn plus(self, other: Self) -> Self {
                self + other
            }

            fn times(self, other: Self) -> Self {
                self * other
            }

            fn least(self, other: Self) -> Self {
                if self < other || self.is_nan() { self } else { other }
            }

            fn greatest(self, other: Self) -> Self {
                if self > other || self.is_nan() { self } else { other }
            }
        }
    )*};
}
arithmetic!(f32, f64);

macro_rules! half_arithmetic {
    ($($kind:ty),*) => {$(
        impl Arithmetic for $kind {
            fn plus(self, other: Self) -> Self {
                Self::from_f32(self.to_f32() + other.to_f32())
            }

            fn times(self, other: Self) -> Self {
                Self::from_f32(self.to_f32() * other.to_f32())
            }

            fn least(self, other: Self) -> Self {
                Self::from_f32(self.to_f32().least(other.to_f32()))
            }

            fn greatest(self, other: Self) -> Self {
                Self::from_f32(self.to_f32().greatest(other.to_f32()))
            }
        }

        impl Element<2> for $kind {
            fn read(bytes: [u8; 2]) -> Self {
                Self(u16::from_ne_bytes(bytes))
            }

            fn bytes(self) -> [u8; 2] {
                self.0.to_ne_bytes()
            }
        }

        impl Float for $kind {
            fn wide(self) -> f64 {
                f64::from(self.to_f32())
            }

            #[allow(clippy::cast_possible_truncation, reason = "it rounds to the nearest")]
            fn narrow(value: f64) -> Self {
                Self::from_f32(value as f32)
            }
        }
    )*};
}
half_arithmetic!(F16, Bf16);

impl Float for f32 {
    fn wide(self) -> f64 {
        f64::from(self)
    }

    #[allow(clippy::cast_possible_truncation, reason = "it rounds to the nearest")]
    fn narrow(value: f64) -> Self {
        value as Self
    }
}

impl Float for f64 {
    fn wide(self) -> f64 {
        self
    }

    fn narrow(value: f64) -> Self {
        value
    }
}

fn scale<const N: usize, T: Element<N> + Float>(sum: &mut [u8], by: f64) {
    for element in sum.as_chunks_mut::<N>().0 {
        *element = T::narrow(T::read(*element).wide() / by).bytes();
    }
}

/// Complex numbers: `N` bytes, of which each part takes `P`.
fn complex<const N: usize, const P: usize, T>(
    sum: &mut [u8],
    other: &[u8],
    how: Reduction,
) -> Option<()>
where
    T: Element<P> + Arithmetic + std::ops::Sub<Output = T>,
{
    match how {
        Reduction::Sum | Reduction::Average => each::<P, T>(sum, other, Arithmetic::plus),
        Reduction::Product => {
            let (sums, _) = sum.as_chunks_mut::<N>();
            let (others, _) = other.as_chunks::<N>();
            for (sum, other) in sums.iter_mut().zip(others) {
                let [a, b] = parts::<P, T>(sum);
                let [c, d] = parts::<P, T>(other);
                let (real, imaginary) = sum.split_at_mut(P);
                real.copy_from_slice(&(a.times(c) - b.times(d)).bytes());
                imaginary.copy_from_slice(&a.times(d).plus(b.times(c)).bytes());
            }
        }
        Reduction::Min
        | Reduction::Max
        | Reduction::BitAnd
        | Reduction::BitOr
        | Reduction::BitXor => return None,
    }
    Some(())
}

fn parts<const P: usize, T: Element<P>>(bytes: &[u8]) -> [T; 2] {
    let (parts, _) = bytes.as_chunks::<P>();
    [T::read(parts[0]), T::read(parts[1])]
}

/// A 16-bit float of IEEE 754.
#[derive(Clone, Copy)]
struct F16(u16);

impl F16 {
    fn to_f32(self) -> f32 {
        let sign = u32::from(self.0 & 0x8000) << 16;
        let exponent = u32::from(self.0 >> 10 & 0x1f);
        let fraction = u32::from(self.0 & 0x3ff);
        match exponent {
            // Zero and subnormal numbers: the fraction counts steps of 2^-24.
            0 => {
                let magnitude = fraction as f32 * 2f32.powi(-24);
                f32::from_bits(sign | magnitude.to_bits())
            }
            0x1f => f32::from_bits(sign | 0x7f80_0000 | fraction << 13),
            _ => f32::from_bits(sign | (exponent + 112) << 23 | fraction << 13),
        }
    }

    #[allow(clippy::cast_possible_truncation, reason = "the values were cut to 16 bits")]
    fn from_f32(value: f32) -> Self {
        let bits = value.to_bits();
        let sign = (bits >> 16 & 0x8000) as u16;
        let magnitude = bits & 0x7fff_ffff;
        if magnitude > 0x7f80_0000 {
            return Self(sign | 0x7e00);
        }
        // 65520 and above rounds to infinity.
        if magnitude >= 0x477f_f000 {
            return Self(sign | 0x7c00);
        }
        // Below the smallest normal number, adding 0.5 leaves the rounded steps in the fraction.
        if magnitude < 0x3880_0000 {
            let steps = (f32::from_bits(magnitude) + 0.5).to_bits() - 0.5f32.to_bits();
            return Self(sign | steps as u16);
        }
        let rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
        Self(sign | ((rounded - 0x3800_0000) >> 13) as u16)
    }
}

/// The upper half of a 32-bit float.
#[derive(Clone, Copy)]
struct Bf16(u16);

impl Bf16 {
    fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(self.0) << 16)
    }

    #[allow(clippy::cast_possible_truncation, reason = "the upper half has 16 bits")]
    fn from_f32(value: f32) -> Self {
        let bits = value.to_bits();
        if value.is_nan() {
            return Self((bits >> 16) as u16 | 0x40);
        }
        Self(((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reduced<const N: usize, T: Element<N>>(
        a: &[T],
        b: &[T],
        dtype: Dtype,
        how: Reduction,
    ) -> Vec<T> {
        let mut sum: Vec<u8> = a.iter().flat_map(|value| value.bytes()).collect();
        let other: Vec<u8> = b.iter().flat_map(|value| value.bytes()).collect();
        reduce_into(&mut sum, &other, dtype, how).unwrap();
        sum.as_chunks::<N>().0.iter().map(|bytes| T::read(*bytes)).collect()
    }

    #[test]
    fn integers_wrap_and_compare() {
        let sum = reduced(&[127i8, -1], &[1, 2], Dtype::I8, Reduction::Sum);
        assert_eq!(sum, [-128, 1]);
        assert_eq!(reduced(&[3i64, -9], &[-4, 5], Dtype::I64, Reduction::Min), [-4, -9]);
        assert_eq!(reduced(&[6i32], &[3], Dtype::I32, Reduction::BitXor), [5]);
        assert_eq!(reduced(&[200u8], &[2], Dtype::U8, Reduction::Max), [200]);
        assert_eq!(reduced(&[60_000u16], &[2], Dtype::U16, Reduction::Max), [60_000]);
        assert_eq!(reduced(&[u32::MAX], &[2], Dtype::U32, Reduction::Sum), [1]);
        assert_eq!(reduced(&[u64::MAX], &[2], Dtype::U64, Reduction::Min), [2]);
    }

    #[test]
    fn truth_values_stay_zero_or_one() {
        assert_eq!(reduced(&[1u8, 0, 1], &[1, 0, 0], Dtype::Bool, Reduction::Sum), [1, 0, 1]);
        assert_eq!(reduced(&[1u8, 0, 1], &[1, 0, 0], Dtype::Bool, Reduction::Product), [1, 0, 0]);
    }

    #[test]
    fn nan_stays_in_minima_and_maxima() {
        for how in [Reduction::Min, Reduction::Max] {
            assert!(reduced(&[f32::NAN], &[1.0], Dtype::F32, how)[0].is_nan());
            assert!(reduced(&[1.0], &[f32::NAN], Dtype::F32, how)[0].is_nan());
        }
    }

    #[test]
    fn every_half_survives_the_way_to_f32_and_back() {
        for bits in 0..=u16::MAX {
            let value = F16(bits).to_f32();
            assert!(value.is_nan() || F16::from_f32(value).0 == bits, "{bits:#x}");
            let value = Bf16(bits).to_f32();
            assert!(value.is_nan() || Bf16::from_f32(value).0 == bits, "{bits:#x}");
        }
    }

    #[test]
    fn halves_round_to_the_nearest_even() {
        // 2049 lies between 2048 and 2050, 2051 between 2050 and 2052.
        assert_eq!(F16::from_f32(2049.0).to_f32(), 2048.0);
        assert_eq!(F16::from_f32(2051.0).to_f32(), 2052.0);
        assert_eq!(F16::from_f32(65519.0).to_f32(), 65504.0);
        assert!(F16::from_f32(65520.0).to_f32().is_infinite());
        assert_eq!(Bf16::from_f32(257.0).to_f32(), 256.0);
        assert_eq!(Bf16::from_f32(259.0).to_f32(), 260.0);
    }

    #[test]
    fn complex_numbers_multiply() {
        // (1 + 2i)(3 + 4i) = -5 + 10i
        let product = reduced(&[1.0f32, 2.0], &[3.0, 4.0], Dtype::Complex64, Reduction::Product);
        assert_eq!(product, [-5.0, 10.0]);
    }

    #[test]
    fn undefined_reductions_are_refused() {
        for (dtype, how) in [
            (Dtype::F32, Reduction::BitAnd),
            (Dtype::I32, Reduction::Average),
            (Dtype::Complex64, Reduction::Max),
        ] {
            assert!(reduce_into(&mut [0; 16], &[0; 16], dtype, how).is_err());
        }
        assert!(divide(&mut [0; 4], Dtype::I32, 2).is_err());
        assert!(Dtype::from_code(15).is_err() && Reduction::from_code(8).is_err());
    }

    #[test]
    fn average_divides() {
        let mut sum = 9f32.to_ne_bytes();
        divide(&mut sum, Dtype::F32, 2).unwrap();
        assert_eq!(f32::from_ne_bytes(sum), 4.5);
    }
}
