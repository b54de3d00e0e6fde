//! Types of numbers (`number.cuh`).

pub use half::{bf16, f16};

/// What numbers are computed with: f32 or f64.
pub trait Real:
    Copy
    + Send
    + Sync
    + 'static
    + std::ops::Add<Output = Self>
    + std::ops::Sub<Output = Self>
    + std::ops::Mul<Output = Self>
    + std::ops::Div<Output = Self>
{
    fn of(x: f64) -> Self;
    fn sqrt(self) -> Self;
    /// Exactly.
    fn wide(self) -> f64;
}

impl Real for f32 {
    fn of(x: f64) -> f32 {
        x as f32
    }
    fn sqrt(self) -> f32 {
        f32::sqrt(self)
    }
    fn wide(self) -> f64 {
        f64::from(self)
    }
}

impl Real for f64 {
    fn of(x: f64) -> f64 {
        x
    }
    fn sqrt(self) -> f64 {
        f64::sqrt(self)
    }
    fn wide(self) -> f64 {
        self
    }
}

/// A type of elements.
pub trait Number: Copy + Default + Send + Sync + 'static {
    /// What it is computed with.
    type Real: Real;
    /// Bytes.
    const SIZE: usize = size_of::<Self>();
    fn read(bytes: &[u8]) -> Self;
    fn write(self, bytes: &mut [u8]);
    /// Exactly.
    fn wide(self) -> f64;
    /// Rounded once.
    fn down(x: f64) -> Self;
    fn up<R: Real>(self) -> R {
        R::of(self.wide())
    }
}

/// To f32, with the last bit set if anything is lost.
fn to_odd(x: f64) -> f32 {
    let near = x as f32;
    if f64::from(near) == x || x.is_nan() {
        return near;
    }
    // Towards zero, unless it is there already.
    let bits = near.to_bits();
    f32::from_bits(if f64::from(near).abs() > x.abs() { bits - 1 } else { bits } | 1)
}

macro_rules! numbers {
    ($($ty:ty: $real:ty, $wide:expr, $down:expr;)*) => {$(
        impl Number for $ty {
            type Real = $real;
            fn read(bytes: &[u8]) -> $ty {
                <$ty>::from_ne_bytes(bytes.try_into().expect("bytes of an element"))
            }
            fn write(self, bytes: &mut [u8]) {
                bytes.copy_from_slice(&self.to_ne_bytes());
            }
            fn wide(self) -> f64 {
                $wide(self)
            }
            fn down(x: f64) -> $ty {
                $down(x)
            }
        }
    )*};
}

/// Bytes and list entries, which are moved and not computed with.
macro_rules! integers {
    ($($ty:ty),*) => {$(
        impl Number for $ty {
            type Real = f64;
            fn read(bytes: &[u8]) -> $ty {
                <$ty>::from_ne_bytes(bytes.try_into().expect("bytes of an element"))
            }
            fn write(self, bytes: &mut [u8]) {
                bytes.copy_from_slice(&self.to_ne_bytes());
            }
            fn wide(self) -> f64 {
                self as f64
            }
            fn down(x: f64) -> $ty {
                x as $ty
            }
        }
    )*};
}

integers!(u8, u32, u64);

numbers! {
    f32: f32, f64::from, |x| x as f32;
    f64: f64, |x| x, |x| x;
    f16: f32, |x| f64::from(f16::to_f32(x)), |x| f16::from_f32(to_odd(x));
    bf16: f32, |x| f64::from(bf16::to_f32(x)), |x| bf16::from_f32(to_odd(x));
}

/// Calls a generic function for the type of a name.
macro_rules! of_type {
    ($name:expr, $T:ident => $call:expr) => {
        match $name {
            "f32" => Some({
                type $T = f32;
                $call
            }),
            "f64" => Some({
                type $T = f64;
                $call
            }),
            "f16" => Some({
                type $T = crate::kernels::training::number::f16;
                $call
            }),
            "bf16" => Some({
                type $T = crate::kernels::training::number::bf16;
                $call
            }),
            _ => None,
        }
    };
}
pub(super) use of_type;
