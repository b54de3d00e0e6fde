//! The authenticated part of a connection: keys from the token and both nonces, and frames.
//!
//! A frame is a length (4 bytes), a message, and 32 bytes of HMAC-SHA-256 over the frame's number, the length
//! and the message. Each direction has a key of its own, made of the token and of both sides' nonces: a frame
//! that was changed, left out, repeated, sent back, or recorded in another session does not verify.

use super::protocol::{Greeting, Malformed};
use super::token::Token;
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

type HmacSha256 = Hmac<Sha256>;

const LENGTH: usize = 4;
const MAC: usize = 32;

/// A fresh nonce.
pub fn nonce() -> std::io::Result<[u8; 32]> {
    let mut nonce = [0; 32];
    getrandom::fill(&mut nonce).map_err(std::io::Error::other)?;
    Ok(nonce)
}

/// Derives the keys of a session: the client's and the server's. `binding` ties them to the TLS session, if
/// there is one.
pub fn keys(token: &Token, client: &Greeting, server: &Greeting, binding: &[u8]) -> (Key, Key) {
    let key = |direction: &[u8]| {
        let mut mac = keyed(token.bytes());
        for part in [b"phalanx store, ", direction, &client.encode(), &server.encode(), binding] {
            mac.update(part);
        }
        Key { mac: keyed(&mac.finalize().into_bytes()), next: 0 }
    };
    (key(b"from the client"), key(b"from the server"))
}

fn keyed(key: &[u8]) -> HmacSha256 {
    HmacSha256::new_from_slice(key).expect("HMAC takes keys of any length")
}

/// The key of one direction, with the number of its next frame.
pub struct Key {
    mac: HmacSha256,
    next: u64,
}

impl Key {
    fn start(&mut self, length: &[u8]) -> HmacSha256 {
        let mut mac = self.mac.clone();
        mac.update(&self.next.to_le_bytes());
        mac.update(length);
        self.next += 1;
        mac
    }

    /// Makes an authenticated frame of a message.
    pub fn seal(&mut self, message: &[u8]) -> Vec<u8> {
        let length = u32::try_from(message.len()).expect("messages are small").to_le_bytes();
        let mut mac = self.start(&length);
        mac.update(message);
        [&length[..], message, &mac.finalize().into_bytes()[..]].concat()
    }

    /// Verifies the frame at the start of `bytes` and returns its message; `None` if it is incomplete. A
    /// message longer than `limit` is refused by its length, before the rest is received.
    pub fn open<'a>(&mut self, bytes: &'a [u8], limit: usize) -> Result<Option<Opened<'a>>, Malformed> {
        let Some((length, rest)) = bytes.split_first_chunk::<LENGTH>() else {
            return Ok(None);
        };
        let len = usize::try_from(u32::from_le_bytes(*length)).unwrap_or(usize::MAX);
        if len > limit {
            return Err(Malformed("it is too long"));
        }
        let Some((message, tag)) = rest.split_at_checked(len) else {
            return Ok(None);
        };
        let Some(tag) = tag.first_chunk::<MAC>() else {
            return Ok(None);
        };
        let mut mac = self.start(length);
        mac.update(message);
        // In constant time.
        mac.verify_slice(tag).map_err(|_| Malformed("its authentication is wrong"))?;
        Ok(Some(Opened { message, taken: LENGTH + len + MAC }))
    }
}

/// A verified frame.
#[derive(Debug, PartialEq, Eq)]
pub struct Opened<'a> {
    /// Its message.
    pub message: &'a [u8],
    /// Length of the whole frame in bytes.
    pub taken: usize,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rendezvous::store::protocol::{Side, VERSION};
    use proptest::prelude::*;

    const TOKEN: &str = "a token that is long enough";

    fn session(token: &str, nonces: [u8; 2]) -> (Key, Key) {
        bound_session(token, nonces, b"")
    }

    fn bound_session(token: &str, nonces: [u8; 2], binding: &[u8]) -> (Key, Key) {
        let greeting =
            |side, nonce| Greeting { side, version: VERSION, encrypted: false, nonce: [nonce; 32] };
        let token = Token::new(token).unwrap();
        keys(&token, &greeting(Side::Client, nonces[0]), &greeting(Side::Server, nonces[1]), binding)
    }

    #[test]
    fn frames_open_once_in_order_and_by_the_right_key_only() {
        let (mut sender, _) = session(TOKEN, [1, 2]);
        let frames = [sender.seal(b"one"), sender.seal(b"two")];
        let opens = |key: &mut Key, frame: &[u8]| key.open(frame, 100).map(|o| o.map(|o| o.message.to_vec()));

        let (mut receiver, mut other_direction) = session(TOKEN, [1, 2]);
        assert_eq!(opens(&mut receiver, &frames[0]), Ok(Some(b"one".to_vec())));
        assert!(opens(&mut receiver, &frames[0]).is_err(), "a repeated frame");
        assert!(opens(&mut other_direction, &frames[0]).is_err(), "a reflected frame");
        assert!(opens(&mut session(TOKEN, [1, 2]).0, &frames[1]).is_err(), "a frame that was left out");
        assert!(opens(&mut session(TOKEN, [1, 3]).0, &frames[0]).is_err(), "another session");
        assert!(opens(&mut session("another token, also long", [1, 2]).0, &frames[0]).is_err());
        assert!(
            opens(&mut bound_session(TOKEN, [1, 2], b"TLS").0, &frames[0]).is_err(),
            "another encryption"
        );
    }

    #[test]
    fn a_long_frame_is_refused_by_its_length() {
        let (mut key, _) = session(TOKEN, [1, 2]);
        assert!(key.open(&u32::MAX.to_le_bytes(), 100).is_err());
    }

    proptest! {
        #[test]
        fn any_changed_byte_is_seen(
            message in proptest::collection::vec(any::<u8>(), 0..200),
            at in any::<prop::sample::Index>(),
            change in 1..=255u8,
        ) {
            let (mut sender, _) = session(TOKEN, [1, 2]);
            let mut frame = sender.seal(&message);
            let at = at.index(frame.len());
            frame[at] ^= change;
            // A longer length waits for more bytes, and then fails.
            let opened = session(TOKEN, [1, 2]).0.open(&frame, 1000).map(|o| o.is_some());
            prop_assert_ne!(opened, Ok(true));
        }

        #[test]
        fn frames_may_come_in_pieces(message in proptest::collection::vec(any::<u8>(), 0..200)) {
            let (mut sender, _) = session(TOKEN, [1, 2]);
            let frame = sender.seal(&message);
            let (mut receiver, _) = session(TOKEN, [1, 2]);
            for end in 0..frame.len() {
                prop_assert_eq!(receiver.open(&frame[..end], 1000), Ok(None));
            }
            let opened = receiver.open(&frame, 1000).unwrap().unwrap();
            prop_assert_eq!((opened.message, opened.taken), (&message[..], frame.len()));
        }
    }
}
