//! User signals: SIGUSR1 and SIGUSR2.

#[cfg(unix)]
pub(crate) use unix::*;
#[cfg(not(unix))]
pub(crate) use without::*;

#[cfg(unix)]
mod unix {
    use signal_hook::consts::{SIGUSR1, SIGUSR2};
    use signal_hook::iterator::Signals;
    use std::io;

    /// A signal: its number.
    #[derive(Debug, Clone, Copy)]
    pub(crate) struct UserSignal(i32);

    impl UserSignal {
        /// The signal of this name, `USR1` or `USR2`.
        pub fn of(name: &str) -> Option<UserSignal> {
            match name {
                "USR1" => Some(UserSignal(SIGUSR1)),
                "USR2" => Some(UserSignal(SIGUSR2)),
                _ => None,
            }
        }

        /// From now on these come, one for each time that the signal does, or for several at once. It is
        /// taken from the rest of the program.
        pub fn occurrences(self) -> io::Result<impl Iterator<Item = ()> + Send + 'static> {
            let mut signals = Signals::new([self.0])?;
            Ok(std::iter::from_fn(move || signals.forever().next().map(drop)))
        }
    }
}

#[cfg(not(unix))]
mod without {
    use std::io;

    /// A signal: there are none here, so no value of this type exists.
    #[derive(Debug, Clone, Copy)]
    pub(crate) enum UserSignal {}

    impl UserSignal {
        pub fn of(_name: &str) -> Option<UserSignal> {
            None
        }

        pub fn occurrences(self) -> io::Result<std::iter::Empty<()>> {
            match self {}
        }
    }
}
