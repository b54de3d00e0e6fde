//! Conversions between `f32` and the small floats, written from the formats' definitions.
//!
//! Arithmetic on the value, not bit tricks on the representation, so that it shares no mistake with the
//! crates (`half`, `float8`) and the vector kernels it is compared with.

/// A binary floating-point format of at most 16 bits.
#[derive(Debug, Clone, Copy)]
pub struct Format {
    exponent_bits: u32,
    mantissa_bits: u32,
    /// Whether the all-ones exponent is reserved for infinity and NaN, as in IEEE 754. If not, only the
    /// all-ones pattern is NaN and there is no infinity.
    ieee: bool,
    /// Whether a value beyond the largest finite one becomes that one, rather than infinite.
    saturates: bool,
}

/// IEEE 754 binary16.
pub const F16: Format = Format { exponent_bits: 5, mantissa_bits: 10, ieee: true, saturates: false };
/// The upper half of a binary32.
pub const BF16: Format = Format { exponent_bits: 8, mantissa_bits: 7, ieee: true, saturates: false };
/// OCP FP8 E4M3.
pub const E4M3: Format = Format { exponent_bits: 4, mantissa_bits: 3, ieee: false, saturates: true };
/// OCP FP8 E5M2.
pub const E5M2: Format = Format { exponent_bits: 5, mantissa_bits: 2, ieee: true, saturates: true };

impl Format {
    fn bias(self) -> i32 {
        (1 << (self.exponent_bits - 1)) - 1
    }

    fn all_ones(self) -> u32 {
        (1 << self.exponent_bits) - 1
    }

    /// The bits of the largest finite magnitude.
    pub fn largest(self) -> u32 {
        if self.ieee {
            (self.all_ones() << self.mantissa_bits) - 1
        } else {
            (1 << (self.exponent_bits + self.mantissa_bits)) - 2
        }
    }

    fn sign_bit(self) -> u32 {
        1 << (self.exponent_bits + self.mantissa_bits)
    }

    /// The bits of the quiet NaN without a payload.
    pub fn nan(self) -> u32 {
        if self.ieee { self.largest() + 1 + (1 << (self.mantissa_bits - 1)) } else { self.largest() + 1 }
    }

    /// The value of a bit pattern; every value of these formats is an `f32`.
    pub fn decode(self, bits: u32) -> f32 {
        let magnitude = bits & (self.sign_bit() - 1);
        let exponent = magnitude >> self.mantissa_bits;
        let fraction = magnitude & ((1 << self.mantissa_bits) - 1);
        let value = if magnitude > self.largest() {
            if self.ieee && fraction == 0 { f64::INFINITY } else { f64::NAN }
        } else {
            // A subnormal has the exponent of the smallest normal number, without the hidden bit.
            let hidden = u32::from(exponent != 0) << self.mantissa_bits;
            let exponent = exponent.max(1) as i32 - self.bias() - self.mantissa_bits as i32;
            f64::from(fraction + hidden) * power_of_two(exponent)
        };
        (if bits & self.sign_bit() != 0 { -value } else { value }) as f32
    }

    /// The nearest value, ties to the one with an even last bit.
    pub fn encode(self, value: f32) -> u32 {
        if value.is_nan() {
            return self.nan();
        }
        let sign = if value.is_sign_negative() { self.sign_bit() } else { 0 };
        let magnitude = f64::from(value.abs());
        let beyond = if self.saturates { self.largest() } else { self.largest() + 1 };
        if magnitude.is_infinite() {
            return sign | beyond;
        }
        let smallest = 1 - self.bias();
        let exponent = exponent_of(magnitude).max(smallest);
        // In units of the last place, the scaling is exact and the rounding the only one.
        let units = magnitude * power_of_two(self.mantissa_bits as i32 - exponent);
        let units = units.round_ties_even() as u32;
        // For a subnormal, `units` are the bits; for a normal number the hidden bit adds one exponent.
        // Rounding up to the next power of two carries into the exponent by itself.
        let bits = ((exponent - smallest) as u32) * (1 << self.mantissa_bits) + units;
        sign | if bits > self.largest() { beyond } else { bits }
    }
}

/// 2^`exponent`, for exponents that are normal in an `f64`.
fn power_of_two(exponent: i32) -> f64 {
    f64::from_bits(((exponent + 1023) as u64) << 52)
}

/// The exponent of a finite magnitude that is normal in an `f64`; very small for zero.
fn exponent_of(magnitude: f64) -> i32 {
    (magnitude.to_bits() >> 52) as i32 - 1023
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_values() {
        assert_eq!(E4M3.decode(0x7e), 448.0);
        assert_eq!(E5M2.decode(0x7b), 57_344.0);
        assert_eq!(F16.decode(0x7bff), 65_504.0);
        assert_eq!(F16.decode(0x0001), 5.960_464_5e-8);
        assert_eq!(BF16.decode(0x3f80), 1.0);
        assert_eq!(E4M3.decode(0xb8), -1.0);
        assert!(E4M3.decode(0x7f).is_nan() && E5M2.decode(0x7e).is_nan());
        assert_eq!(E5M2.decode(0x7c), f32::INFINITY);
    }

    #[test]
    fn every_value_survives_the_way_there_and_back() {
        for format in [F16, BF16, E4M3, E5M2] {
            for bits in 0..2 * format.sign_bit() {
                let value = format.decode(bits);
                if value.is_finite() {
                    assert_eq!(format.encode(value), bits, "{format:?} {bits:#x}");
                }
            }
        }
    }

    #[test]
    fn rounds_to_nearest_ties_to_even_and_ends_as_documented() {
        // 17 lies between 16 and 18 in E4M3, 19 between 18 and 20.
        assert_eq!(E4M3.decode(E4M3.encode(17.0)), 16.0);
        assert_eq!(E4M3.decode(E4M3.encode(19.0)), 20.0);
        assert_eq!(E4M3.encode(1e9), 0x7e);
        assert_eq!(E5M2.encode(f32::NEG_INFINITY), 0xfb);
        assert_eq!(F16.encode(65_519.9), 0x7bff);
        assert_eq!(F16.encode(65_520.0), 0x7c00);
        assert_eq!(BF16.encode(f32::from_bits(0x3f80_8000)), 0x3f80);
        assert_eq!(BF16.encode(f32::from_bits(0x3f81_8000)), 0x3f82);
        assert_eq!(F16.encode(f32::from_bits(1)), 0);
        assert_eq!(F16.encode(-0.0), 0x8000);
    }
}
