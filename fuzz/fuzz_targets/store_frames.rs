//! The store's frames: no bytes open without the key, and what the key has sealed opens, whatever follows it.
#![no_main]

use libfuzzer_sys::fuzz_target;
use phalanx::internal::store::Token;
use phalanx::internal::store::protocol::{Greeting, Side, VERSION};
use phalanx::internal::store::session::{Key, keys};

fn key() -> Key {
    let token = Token::new("the token of the fuzzer").expect("it is long enough");
    let greeting = |side| Greeting { side, version: VERSION, encrypted: false, nonce: [7; 32] };
    keys(&token, &greeting(Side::Client), &greeting(Side::Server), b"").0
}

fuzz_target!(|bytes: &[u8]| {
    assert!(!matches!(key().open(bytes, 1 << 16), Ok(Some(_))), "a forged frame");
    let frame = [&key().seal(bytes)[..], bytes].concat();
    let mut receiver = key();
    let opened = receiver.open(&frame, usize::MAX).expect("it is genuine").expect("it is complete");
    assert_eq!(opened.message, bytes);
});
