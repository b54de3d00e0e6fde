//! Memory that is registered with a communicator.

use crate::base::handles::{self, Handle};
use crate::cuda::memory::{self, Range};

/// The registrations of a communicator.
#[derive(Default)]
pub struct Registrations(Vec<Registration>);

struct Registration {
    handle: Handle,
    range: Range,
    /// How many times this range was registered; all have one handle.
    count: usize,
}

impl Registrations {
    /// Registers a range.
    pub fn add(&mut self, range: Range) -> Handle {
        let same =
            |other: &&mut Registration| (other.range.address, other.range.len) == (range.address, range.len);
        if let Some(registration) = self.0.iter_mut().find(same) {
            registration.count += 1;
            return registration.handle;
        }
        memory::register(range.address, true);
        let handle = handles::fresh();
        self.0.push(Registration { handle, range, count: 1 });
        handle
    }

    /// Undoes one registration; false if there is none with this handle.
    pub fn remove(&mut self, handle: Handle) -> bool {
        let Some(place) = self.0.iter().position(|registration| registration.handle == handle) else {
            return false;
        };
        self.0[place].count -= 1;
        if self.0[place].count == 0 {
            let registration = self.0.swap_remove(place);
            memory::register(registration.range.address, false);
        }
        true
    }

    /// Ends all registrations with their communicator.
    pub fn clear(&mut self) {
        self.0.drain(..).for_each(|registration| memory::register(registration.range.address, false));
    }
}
