//! Numbers.

use phalanx_train::device::Number;

#[test]
fn numbers_are_rounded_once() {
    // Just above the middle of two numbers: rounded to f32 first, it would be the middle, and go to the even one.
    let above = |bits: i32| 1.0 + 2f64.powi(-bits) + 2f64.powi(-40);
    assert_eq!(<phalanx::f16 as Number>::from_f64(above(11)).to_f64(), 1.0 + 2f64.powi(-10));
    assert_eq!(<phalanx::bf16 as Number>::from_f64(above(8)).to_f64(), 1.0 + 2f64.powi(-7));
}
