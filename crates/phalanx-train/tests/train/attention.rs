//! Ring attention.

use phalanx::bf16;
use phalanx_train::Result;
use phalanx_train::attention::{Attention, Block, Kernel, Mask, Ring};
use phalanx_train::device::{Host, Number};

/// Attention by plain loops, in f64.
struct Plain {
    heads: usize,
    size: usize,
    /// Blocks computed.
    blocks: usize,
}

impl Plain {
    fn at(&self, token: usize, head: usize) -> std::ops::Range<usize> {
        (token * self.heads + head) * self.size..(token * self.heads + head + 1) * self.size
    }

    fn scores<T: Number>(&self, block: &Block<&[T]>, query: usize, head: usize) -> Vec<f64> {
        let keys = block.keys.len() / (self.heads * self.size);
        let seen = if block.mask == Mask::Causal { query + 1 } else { keys };
        let q = &block.queries[self.at(query, head)];
        let dot = |key: usize| {
            q.iter().zip(&block.keys[self.at(key, head)]).map(|(q, k)| q.to_f64() * k.to_f64()).sum::<f64>()
        };
        (0..seen).map(|key| dot(key) / (self.size as f64).sqrt()).collect()
    }
}

impl<T: Number> Kernel<Host, T> for Plain {
    fn forward(&mut self, block: Block<&[T]>) -> Result<(Vec<T>, Vec<f64>)> {
        self.blocks += 1;
        let (mut output, mut sums) = (vec![0.0; block.queries.len()], Vec::new());
        for query in 0..block.queries.len() / (self.heads * self.size) {
            for head in 0..self.heads {
                let scores = self.scores(&block, query, head);
                let greatest = scores.iter().copied().fold(f64::MIN, f64::max);
                let sum = greatest + scores.iter().map(|score| (score - greatest).exp()).sum::<f64>().ln();
                for (key, score) in scores.iter().enumerate() {
                    for (output, v) in
                        output[self.at(query, head)].iter_mut().zip(&block.values[self.at(key, head)])
                    {
                        *output += (score - sum).exp() * v.to_f64();
                    }
                }
                sums.push(sum);
            }
        }
        Ok((output.into_iter().map(T::from_f64).collect(), sums))
    }

    fn backward(
        &mut self,
        block: Block<&[T]>,
        output: &[T],
        sums: &[f64],
        gradient: &[T],
    ) -> Result<[Vec<T>; 3]> {
        let (mut of_q, mut of_k, mut of_v) =
            (vec![0.0; block.queries.len()], vec![0.0; block.keys.len()], vec![0.0; block.keys.len()]);
        let scale = 1.0 / (self.size as f64).sqrt();
        for query in 0..block.queries.len() / (self.heads * self.size) {
            for head in 0..self.heads {
                let q_at = self.at(query, head);
                let g = &gradient[q_at.clone()];
                let total: f64 =
                    g.iter().zip(&output[q_at.clone()]).map(|(g, o)| g.to_f64() * o.to_f64()).sum();
                for (key, score) in self.scores(&block, query, head).into_iter().enumerate() {
                    let k_at = self.at(key, head);
                    let p = (score - sums[query * self.heads + head]).exp();
                    let of_p: f64 =
                        g.iter().zip(&block.values[k_at.clone()]).map(|(g, v)| g.to_f64() * v.to_f64()).sum();
                    let of_score = p * (of_p - total) * scale;
                    for (at, (q_at, k_at)) in q_at.clone().zip(k_at).enumerate() {
                        of_v[k_at] += p * g[at].to_f64();
                        of_q[q_at] += of_score * block.keys[k_at].to_f64();
                        of_k[k_at] += of_score * block.queries[q_at].to_f64();
                    }
                }
            }
        }
        Ok([of_q, of_k, of_v].map(|gradient| gradient.into_iter().map(T::from_f64).collect()))
    }
}

fn numbers<T: Number>(salt: usize, len: usize) -> Vec<T> {
    (0..len).map(|at| T::from_f64(((at * 13 + salt * 71) as f64 * 0.39).sin())).collect()
}

fn close<T: Number>(here: &[T], expected: &[f64], error: f64) {
    assert_eq!(here.len(), expected.len());
    for (here, expected) in here.iter().zip(expected) {
        assert!((here.to_f64() - expected).abs() <= error, "{} is not {expected}", here.to_f64());
    }
}

/// Output and gradients on any number of ranks are those of dense attention, in f64.
fn is_dense<T: Number, A: Number>(tokens: usize, heads: usize, size: usize, is_causal: bool, error: f64) {
    let len = tokens * heads * size;
    let wide = |salt: usize| -> Vec<f64> { numbers::<T>(salt, len).into_iter().map(T::to_f64).collect() };
    let [q, k, v, g] = [1, 2, 3, 4].map(wide);
    let mut dense = Plain { heads, size, blocks: 0 };
    let block = || Block {
        queries: &q[..],
        keys: &k[..],
        values: &v[..],
        mask: if is_causal { Mask::Causal } else { Mask::Full },
    };
    let (output, sums) = dense.forward(block()).unwrap();
    let gradients = dense.backward(block(), &output, &sums, &g).unwrap();
    for ranks in 1..=5 {
        phalanx::run(ranks, |comm| {
            let ring = Ring::new(&comm, tokens, heads, size, is_causal).unwrap();
            let own = |whole: &[f64]| -> Vec<f64> {
                let tokens = ring.tokens(comm.rank()).into_iter().flatten();
                tokens
                    .flat_map(|token| whole[token * heads * size..(token + 1) * heads * size].to_vec())
                    .collect()
            };
            let given = |whole: &[f64]| -> Vec<T> { own(whole).into_iter().map(T::from_f64).collect() };
            let [q, k, v, g] = [&q, &k, &v, &g].map(|whole| given(whole));
            let mut kernel = Plain { heads, size, blocks: 0 };
            let attention: Attention<_, _> =
                ring.forward::<_, T, A>(&comm, &Host, &mut kernel, [&q, &k, &v]).unwrap();
            close(&attention.output, &own(&output), error);
            let here =
                ring.backward::<_, T, A>(&comm, &Host, &mut kernel, [&q, &k, &v], &attention, &g).unwrap();
            for (here, expected) in here.iter().zip(&gradients) {
                close(here, &own(expected), error);
            }
            if is_causal && tokens >= 2 * ranks {
                // Chunks with themselves and with all before.
                let all: usize =
                    [comm.rank(), 2 * ranks - 1 - comm.rank()].iter().map(|chunk| chunk + 1).sum();
                assert_eq!(kernel.blocks, all);
            }
        })
        .unwrap();
    }
}

#[test]
fn it_is_dense_attention_forwards_and_backwards() {
    for is_causal in [false, true] {
        for (tokens, heads, size) in [(8, 1, 4), (7, 2, 3), (16, 3, 2), (3, 1, 2)] {
            is_dense::<f64, f64>(tokens, heads, size, is_causal, 1e-12);
            is_dense::<f32, f32>(tokens, heads, size, is_causal, 1e-5);
        }
        is_dense::<bf16, f32>(12, 2, 4, is_causal, 0.05);
    }
}

/// Without queries and keys, a token's output is the mean of the values up to it.
#[test]
fn seven_tokens_on_two_ranks_are_as_worked_out() {
    phalanx::run(2, |comm| {
        let ring = Ring::new(&comm, 7, 1, 1, true).unwrap();
        let own: Vec<f64> =
            ring.tokens(comm.rank()).into_iter().flatten().map(|token| token as f64).collect();
        assert_eq!(own, [vec![0.0, 1.0, 6.0], vec![2.0, 3.0, 4.0, 5.0]][comm.rank()]);
        let zeros = vec![0.0; own.len()];
        let mut kernel = Plain { heads: 1, size: 1, blocks: 0 };
        let attention =
            ring.forward::<_, f64, f64>(&comm, &Host, &mut kernel, [&zeros, &zeros, &own]).unwrap();
        close(&attention.output, &own.iter().map(|token| token / 2.0).collect::<Vec<_>>(), 1e-12);
    })
    .unwrap();
}

#[test]
fn ranks_have_the_same_work() {
    phalanx::run(2, |comm| {
        let ring = Ring::new(&comm, 8, 1, 1, true).unwrap();
        assert_eq!([ring.pairs(0), ring.pairs(1)], [18, 18]);
        let text = ring
            .forward::<_, f32, f32>(
                &comm,
                &Host,
                &mut Plain { heads: 1, size: 1, blocks: 0 },
                [&vec![0.0; 4], &vec![0.0; 3], &vec![0.0; 4]],
            )
            .unwrap_err()
            .to_string();
        assert!(text.contains("3 numbers of keys for the tokens"), "{text}");
        assert!(Ring::new(&comm, 8, 0, 1, true).is_err());
    })
    .unwrap();
}
