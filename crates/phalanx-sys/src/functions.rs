//! Tables of functions that a loaded library has.

/// Makes `struct Functions`, whose fields are `None` where the library lacks a function.
macro_rules! functions {
    ($( $name:ident($($argument:ident: $ty:ty),*) -> $answer:ty; )*) => {
        /// The functions that the loaded library has. Each is `None` if it has not.
        #[derive(Debug, Clone, Copy)]
        #[allow(missing_docs, non_snake_case)]
        pub struct Functions {
            $(pub $name: Option<unsafe extern "C" fn($($argument: $ty),*) -> $answer>,)*
        }

        impl Functions {
            fn load(library: &$crate::Library) -> Functions {
                let name = |name: &'static str| {
                    std::ffi::CStr::from_bytes_with_nul(name.as_bytes()).expect("the macro adds one NUL")
                };
                // SAFETY: the types are those of the C header.
                unsafe { Functions { $($name: library.symbol(name(concat!(stringify!($name), "\0"))),)* } }
            }

            /// Names of those that are not there.
            pub fn missing(&self) -> Vec<&'static str> {
                [$((stringify!($name), self.$name.is_none())),*]
                    .into_iter()
                    .filter_map(|(name, missing)| missing.then_some(name))
                    .collect()
            }
        }
    };
}
