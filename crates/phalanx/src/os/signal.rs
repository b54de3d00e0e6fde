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

    /// A signal, by its number.
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

        /// Catches the signal from now on. The iterator yields an item for one or more deliveries. The
        /// program's own handler no longer runs.
        pub fn occurrences(self) -> io::Result<impl Iterator<Item = ()> + Send + 'static> {
            let mut signals = Signals::new([self.0])?;
            Ok(std::iter::from_fn(move || signals.forever().next().map(drop)))
        }
    }
}

#[cfg(not(unix))]
mod without {
    use std::io;

    /// A signal. Not supported here: this type has no values.
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
