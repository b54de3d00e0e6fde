//! Inference of a model of the Llama family, its layers split among ranks: a batch of prompts, with a cache of keys and values.
//!
//! ```text
//! cargo run --release -p phalanx-candle --example llama_tp -- --model /tmp/llama --init --ranks 2 --check
//! phalanx launch -n 2 -- target/release/examples/llama_tp --model /tmp/llama
//! ```
//!
//! The model is a folder with `config.json` and `*.safetensors` as on model hubs; each rank reads its part. `--init` makes a small one of
//! random numbers. There is no tokenizer here: a prompt is its bytes, or with `--ids` the numbers that a tokenizer has made.

mod shared;

use candle_core::{D, DType, IndexOp, Result, Tensor};
use candle_nn::kv_cache::KvCache;
use candle_nn::rotary_emb::rope;
use candle_nn::{Linear, Module, RmsNorm, VarMap, ops};
use clap::Parser;
use phalanx_candle::{Init, Ranks, RowParallelLinear, VocabParallelEmbedding, Weights, kv_heads, part};
use serde::Deserialize;
use std::ops::Range;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

/// Continues prompts with a model of the Llama family.
#[derive(Parser, Clone)]
struct Options {
    /// Ranks as threads of this process. Without it, the launcher's ranks; or one.
    #[arg(long)]
    ranks: Option<usize>,
    /// The folder of the model.
    #[arg(long)]
    model: PathBuf,
    /// Makes a small model of random numbers there first.
    #[arg(long)]
    init: bool,
    /// Compares the first logits with those of one rank.
    #[arg(long)]
    check: bool,
    /// Tokens after each prompt.
    #[arg(long, default_value_t = 32)]
    tokens: usize,
    /// Prompts are numbers of tokens, with commas between them.
    #[arg(long)]
    ids: bool,
    /// Calculates in bf16.
    #[arg(long)]
    bf16: bool,
    /// Prompts, which make a batch.
    #[arg(default_values_t = ["Ranks that move data".to_string(), "together".to_string()])]
    prompts: Vec<String>,
}

/// What is read of `config.json`.
#[derive(Clone, Deserialize)]
struct Config {
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: usize,
    rms_norm_eps: f64,
    rope_theta: Option<f32>,
    tie_word_embeddings: Option<bool>,
    head_dim: Option<usize>,
    rope_scaling: Option<serde_json::Value>,
    attention_bias: Option<bool>,
}

/// The small model's.
const SMALL: &str = r#"{
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": false
}"#;

impl Config {
    fn new(text: &str) -> Result<Config> {
        let config: Config = serde_json::from_str(text).map_err(candle_core::Error::wrap)?;
        if config.rope_scaling.is_some() || config.attention_bias == Some(true) {
            candle_core::bail!("config.json asks for rope_scaling or attention_bias, which is not done here");
        }
        Ok(config)
    }
}

struct Block {
    norms: [RmsNorm; 2],
    /// This rank's heads of queries, keys and values.
    qkv: Linear,
    out: RowParallelLinear,
    /// This rank's rows of both.
    gate_up: Linear,
    down: RowParallelLinear,
    cache: KvCache,
}

struct Llama {
    config: Config,
    ranks: Ranks,
    embed: VocabParallelEmbedding,
    blocks: Vec<Block>,
    norm: RmsNorm,
    head: Linear,
    /// Cosines and sines, `[places, size / 2]`.
    turns: [Tensor; 2],
    /// Numbers of a head.
    size: usize,
}

/// Name, rows of all ranks, rows of this one.
type Matrix<'a> = (&'a str, usize, Range<usize>);

/// Rows of several matrices with as many columns, one matrix below the other.
fn rows_of(columns: usize, matrices: &[Matrix<'_>], weights: &Weights) -> Result<Linear> {
    let init = Init::Normal { mean: 0.0, deviation: (1.0 / columns as f64).sqrt() };
    let rows = |(name, outputs, rows): &Matrix<'_>| {
        weights.pp(name).rows((*outputs, columns), "weight", 0, rows.clone(), &init)
    };
    Ok(Linear::new(Tensor::cat(&matrices.iter().map(rows).collect::<Result<Vec<_>>>()?, 0)?, None))
}

impl Llama {
    /// A model for sequences of so many tokens.
    fn new(config: &Config, length: usize, weights: &Weights) -> Result<Llama> {
        let (ranks, c) = (weights.ranks().clone(), config);
        let heads = c.num_attention_heads;
        let size = c.head_dim.unwrap_or(c.hidden_size / heads);
        if !heads.is_multiple_of(ranks.world_size()) {
            candle_core::bail!("{} ranks cannot share {heads} heads evenly", ranks.world_size());
        }
        let own = |count: usize| part(&(0..count), ranks.world_size(), ranks.rank());
        let kv = kv_heads(&ranks, c.num_key_value_heads)?;
        let norm = |name: &str, weights: &Weights| -> Result<RmsNorm> {
            let weight = weights.pp(name).get(c.hidden_size, "weight", &Init::Constant(1.0))?;
            Ok(RmsNorm::new(weight, c.rms_norm_eps))
        };
        let model = weights.pp("model");
        let block = |number: usize| -> Result<Block> {
            let weights = model.pp("layers").pp(number);
            let (attention, mlp) = (weights.pp("self_attn"), weights.pp("mlp"));
            let numbers = |heads: &Range<usize>| heads.start * size..heads.end * size;
            let (q, kv) = (numbers(&own(heads)), numbers(&kv));
            let kv_outputs = c.num_key_value_heads * size;
            let qkv =
                [("q_proj", heads * size, q), ("k_proj", kv_outputs, kv.clone()), ("v_proj", kv_outputs, kv)];
            let inner = c.intermediate_size;
            let gate_up = [("gate_proj", inner, own(inner)), ("up_proj", inner, own(inner))];
            Ok(Block {
                norms: [norm("input_layernorm", &weights)?, norm("post_attention_layernorm", &weights)?],
                qkv: rows_of(c.hidden_size, &qkv, &attention)?,
                out: RowParallelLinear::new(heads * size, c.hidden_size, false, &attention.pp("o_proj"))?,
                gate_up: rows_of(c.hidden_size, &gate_up, &mlp)?,
                down: RowParallelLinear::new(inner, c.hidden_size, false, &mlp.pp("down_proj"))?,
                cache: KvCache::new(2, length),
            })
        };
        let blocks = (0..c.num_hidden_layers).map(block).collect::<Result<Vec<_>>>()?;
        let embed = VocabParallelEmbedding::new(c.vocab_size, c.hidden_size, &model.pp("embed_tokens"))?;
        let head = match c.tie_word_embeddings {
            Some(true) => Linear::new(embed.embeddings().clone(), None),
            _ => rows_of(c.hidden_size, &[("lm_head", c.vocab_size, own(c.vocab_size))], weights)?,
        };
        let (theta, half) = (c.rope_theta.unwrap_or(10_000.0), size / 2);
        let angle = |at: usize| (at / half) as f32 / theta.powf((at % half) as f32 / half as f32);
        let angles =
            Tensor::from_iter((0..length * half).map(angle), ranks.device())?.reshape((length, half))?;
        let turns = [angles.cos()?.to_dtype(weights.dtype())?, angles.sin()?.to_dtype(weights.dtype())?];
        Ok(Llama { config: c.clone(), embed, blocks, norm: norm("norm", &model)?, head, turns, size, ranks })
    }

    /// The logits of the last token of each sequence, `[sequences, vocabulary]`, the same on all ranks. `ids` are the next tokens, `[sequences,
    /// tokens]`; `mask` is added to the scores, `[sequences, 1, tokens, tokens so far]`.
    fn forward(&mut self, ids: &Tensor, mask: &Tensor) -> Result<Tensor> {
        let mut x = self.embed.forward(ids)?;
        for number in 0..self.blocks.len() {
            let attended = self.attention(number, &self.blocks[number].norms[0].forward(&x)?, mask)?;
            x = (x + attended)?;
            let block = &self.blocks[number];
            let both = block.gate_up.forward(&block.norms[1].forward(&x)?)?;
            let inner = both.chunk(2, D::Minus1)?;
            x = (x + block.down.forward(&(inner[0].silu()? * &inner[1])?)?)?;
        }
        let last = self.norm.forward(&x.i((.., x.dim(1)? - 1))?.contiguous()?)?;
        let all = self.ranks.all_gather_parts(&self.head.forward(&last)?, 1, self.config.vocab_size)?;
        all.to_dtype(DType::F32)
    }

    /// The heads of this rank, and the sum over all ranks.
    fn attention(&mut self, number: usize, x: &Tensor, mask: &Tensor) -> Result<Tensor> {
        let (batch, tokens, _) = x.dims3()?;
        let own = self.config.num_attention_heads / self.ranks.world_size();
        let kv = kv_heads(&self.ranks, self.config.num_key_value_heads)?.len();
        let (size, block) = (self.size, &mut self.blocks[number]);
        // [batch, heads, tokens, size]
        let heads = block.qkv.forward(x)?.reshape((batch, tokens, own + 2 * kv, size))?.transpose(1, 2)?;
        let place = block.cache.current_seq_len();
        let turns = [self.turns[0].narrow(0, place, tokens)?, self.turns[1].narrow(0, place, tokens)?];
        let turned = |from, count| rope(&heads.narrow(1, from, count)?.contiguous()?, &turns[0], &turns[1]);
        let (q, k) = (turned(0, own)?, turned(own, kv)?);
        let (k, v) = block.cache.append(&k, &heads.narrow(1, own + kv, kv)?.contiguous()?)?;
        let so_far = k.dim(2)?;
        let spread = |x: Tensor| {
            let shape = (batch, kv, own / kv, so_far, size);
            x.unsqueeze(2)?.broadcast_as(shape)?.reshape((batch, own, so_far, size))
        };
        let (k, v) = (spread(k)?, spread(v)?);
        let scores = (q.matmul(&k.t()?)? / (size as f64).sqrt())?.broadcast_add(mask)?;
        let y = ops::softmax_last_dim(&scores)?.matmul(&v)?.transpose(1, 2)?;
        block.out.forward(&y.reshape((batch, tokens, own * size))?)
    }
}

/// What is added to scores: much less than any score where a token is a later one, or fills up a shorter prompt on the left.
fn mask(fill: &[usize], tokens: Range<usize>, weights: &Weights) -> Result<Tensor> {
    let rows = fill.iter().flat_map(|fill| tokens.clone().map(move |row| *fill..row + 1));
    let row = |seen: Range<usize>| {
        (0..tokens.end).map(move |column| if seen.contains(&column) { 0f32 } else { -1e9 })
    };
    let shape = (fill.len(), 1, tokens.len(), tokens.end);
    Tensor::from_iter(rows.flat_map(row), weights.device())?.reshape(shape)?.to_dtype(weights.dtype())
}

fn generate(ranks: &Ranks, options: &Options) -> Result<()> {
    let alone = ranks.split(Some(ranks.rank() as u32), 0)?.expect("it has a colour");
    if options.init && ranks.rank() == 0 {
        std::fs::create_dir_all(&options.model)?;
        let variables = VarMap::new();
        Llama::new(&Config::new(SMALL)?, 1, &Weights::variables(&alone, &variables, 1, DType::F32))?;
        variables.save(options.model.join("model.safetensors"))?;
        std::fs::write(options.model.join("config.json"), SMALL)?;
    }
    ranks.barrier()?;
    let path = options.model.join("config.json");
    let read = std::fs::read_to_string(&path);
    let config = Config::new(&read.map_err(|error| candle_core::Error::wrap(error).with_path(&path))?)?;
    let paths = std::fs::read_dir(&options.model)?.flatten().map(|entry| entry.path());
    let is_one = |path: &PathBuf| path.extension().is_some_and(|name| name == "safetensors");
    let files: Vec<PathBuf> = paths.filter(is_one).collect();
    let dtype = if options.bf16 { DType::BF16 } else { DType::F32 };
    // SAFETY: the files of a model are not written to while it runs; with `--init` they are complete behind the barrier.
    let weights = unsafe { Weights::from_files(ranks, &files, dtype) }?;

    let id = |number: &str| number.trim().parse().map_err(candle_core::Error::wrap);
    let ids = |prompt: &String| match options.ids {
        true => prompt.split(',').map(id).collect(),
        false => Ok(prompt.bytes().map(u32::from).collect()),
    };
    let prompts = options.prompts.iter().map(ids).collect::<Result<Vec<Vec<u32>>>>()?;
    let is_wrong = |ids: &Vec<u32>| ids.is_empty() || ids.iter().any(|id| *id as usize >= config.vocab_size);
    if prompts.iter().any(is_wrong) {
        candle_core::bail!("a prompt is empty, or has a token beyond the vocabulary");
    }
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
    let fill: Vec<usize> = prompts.iter().map(|prompt| longest - prompt.len()).collect();
    let filled = |(prompt, fill): (&Vec<u32>, &usize)| [vec![0; *fill], prompt.clone()].concat();
    let batch: Vec<u32> = prompts.iter().zip(&fill).flat_map(filled).collect();
    let batch = Tensor::from_vec(batch, (prompts.len(), longest), ranks.device())?;

    let length = longest + options.tokens;
    let mut llama = Llama::new(&config, length, &weights)?;
    let began = Instant::now();
    let mut logits = llama.forward(&batch, &mask(&fill, 0..longest, &weights)?)?;
    let prefill = began.elapsed().as_secs_f64();
    if options.check && ranks.rank() == 0 {
        let mut one = Llama::new(&config, length, &weights.among(&alone))?;
        let apart = (one.forward(&batch, &mask(&fill, 0..longest, &weights)?)? - &logits)?.abs()?;
        let most = apart.flatten_all()?.max(0)?.to_scalar::<f32>()?;
        println!("logits are at most {most:.1e} from those of one rank");
        if most > if options.bf16 { 0.1 } else { 1e-3 } {
            candle_core::bail!("logits differ from those of one rank by {most}");
        }
    }
    let began = Instant::now();
    let mut generated = Vec::new();
    for place in longest..length {
        let next = logits.argmax(D::Minus1)?;
        generated.push(next.clone());
        logits = llama.forward(&next.unsqueeze(1)?, &mask(&fill, place..place + 1, &weights)?)?;
    }
    let decode = began.elapsed().as_secs_f64();
    if ranks.rank() == 0 {
        let generated = Tensor::stack(&generated, 1)?.to_vec2::<u32>()?;
        for (prompt, ids) in options.prompts.iter().zip(&generated) {
            let bytes: Vec<u8> = ids.iter().map(|id| *id as u8).collect();
            let text = String::from_utf8_lossy(&bytes).escape_debug().to_string();
            println!("{prompt:?} {}", if options.ids { format!("{ids:?}") } else { text });
        }
        let rate = |tokens: usize, seconds: f64| (prompts.len() * tokens) as f64 / seconds;
        print!("{} ranks: prefill {:.0} tokens/s, ", ranks.world_size(), rate(longest, prefill));
        println!("decode {:.0} tokens/s", rate(options.tokens, decode));
    }
    Ok(())
}

fn main() -> ExitCode {
    let options = Options::parse();
    shared::on_ranks(options.ranks, |ranks| generate(ranks, &options))
}
