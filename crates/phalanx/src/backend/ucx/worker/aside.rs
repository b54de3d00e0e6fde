//! Long messages of the user that no receive is for: they are fetched to memory aside.

use super::{State, Worker, settled};

/// Memory for a message that no receive is for, so that its sender can go on.
pub(super) struct Aside {
    pub bytes: Vec<u8>,
    pub state: State,
    /// Nobody needs it: it is freed when UCX has let go of it.
    is_dropped: bool,
}

impl Worker {
    /// Fetches what the user's senders wait to send and no receive is for, so that they can go on.
    pub fn fetch_aside(&mut self) {
        for message in self.mail.get_mut().unfetched() {
            let mut bytes = vec![0u8; message.len];
            // SAFETY: the memory is kept until the request is over.
            let state = unsafe { self.fetch(message.descriptor, bytes.as_mut_ptr(), message.len) };
            let aside = Some(Aside { bytes, state, is_dropped: false });
            let number = self.asides.iter().position(Option::is_none).unwrap_or_else(|| {
                self.asides.push(None);
                self.asides.len() - 1
            });
            self.asides[number] = aside;
            self.mail.get_mut().fetch_aside(&message, number);
        }
        for number in 0..self.asides.len() {
            if self.asides[number].as_ref().is_some_and(|aside| aside.is_dropped) {
                self.drop_aside(number);
            }
        }
    }

    /// Frees memory aside, at the latest when UCX has let go of it.
    pub(super) fn drop_aside(&mut self, number: usize) {
        let ucx = self.ucx;
        let Some(aside) = &mut self.asides[number] else { return };
        aside.is_dropped = true;
        if settled(ucx, &mut aside.state).is_some() {
            self.asides[number] = None;
        }
    }
}
