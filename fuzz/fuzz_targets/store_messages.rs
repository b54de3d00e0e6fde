//! The store's messages: any bytes are a message or an error; a message is the same after a round trip.
#![no_main]

use libfuzzer_sys::fuzz_target;
use phalanx::internal::store::protocol::{Greeting, Reply, Request};

fuzz_target!(|bytes: &[u8]| {
    if let Ok(greeting) = Greeting::decode(bytes) {
        assert_eq!(greeting.encode(), bytes);
    }
    if let Ok(request) = Request::decode(bytes) {
        assert_eq!(Request::decode(&request.encode()), Ok(request));
    }
    if let Ok(reply) = Reply::decode(bytes) {
        assert_eq!(Reply::decode(&reply.encode()), Ok(reply));
    }
});
