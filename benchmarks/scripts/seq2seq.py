"""Translation with nn.Transformer: causal and padding masks, greedy decoding before training goes on."""

import argparse
import math

import torch
from torch import nn

SRC_VOCAB, TGT_VOCAB, EMB, PAD_IDX, BOS_IDX = 20, 22, 16, 1, 2
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class PositionalEncoding(nn.Module):
    def __init__(self, emb_size, dropout, maxlen=64):
        super().__init__()
        den = torch.exp(-torch.arange(0, emb_size, 2) * math.log(10000) / emb_size)
        pos = torch.arange(0, maxlen).reshape(maxlen, 1)
        pos_embedding = torch.zeros((maxlen, emb_size))
        pos_embedding[:, 0::2] = torch.sin(pos * den)
        pos_embedding[:, 1::2] = torch.cos(pos * den)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("pos_embedding", pos_embedding.unsqueeze(-2))

    def forward(self, token_embedding):
        return self.dropout(token_embedding + self.pos_embedding[: token_embedding.size(0), :])


class Seq2SeqTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.transformer = nn.Transformer(EMB, 2, 1, 1, 32, 0.1)
        self.generator = nn.Linear(EMB, TGT_VOCAB)
        self.src_tok_emb = nn.Embedding(SRC_VOCAB, EMB)
        self.tgt_tok_emb = nn.Embedding(TGT_VOCAB, EMB)
        self.positional_encoding = PositionalEncoding(EMB, dropout=0.1)

    def forward(self, src, tgt, src_mask, tgt_mask, src_pad, tgt_pad):
        src_emb = self.positional_encoding(self.src_tok_emb(src) * math.sqrt(EMB))
        tgt_emb = self.positional_encoding(self.tgt_tok_emb(tgt) * math.sqrt(EMB))
        return self.generator(self.transformer(src_emb, tgt_emb, src_mask, tgt_mask, None, src_pad, tgt_pad, src_pad))


def generate_square_subsequent_mask(sz, device):
    mask = torch.triu(torch.ones((sz, sz), device=device), diagonal=1)
    return mask.bool()


def create_mask(src, tgt, device):
    tgt_mask = generate_square_subsequent_mask(tgt.shape[0], device)
    src_mask = torch.zeros((src.shape[0], src.shape[0]), device=device).type(torch.bool)
    return src_mask, tgt_mask, (src == PAD_IDX).transpose(0, 1), (tgt == PAD_IDX).transpose(0, 1)


def train_epoch(model, optimizer, loss_fn, dataloader, device):
    model.train()
    losses = 0
    for src, tgt in dataloader:
        src = src.to(device)
        tgt = tgt.to(device)
        tgt_input = tgt[:-1, :]
        src_mask, tgt_mask, src_pad, tgt_pad = create_mask(src, tgt_input, device)
        logits = model(src, tgt_input, src_mask, tgt_mask, src_pad, tgt_pad)
        optimizer.zero_grad()
        tgt_out = tgt[1:, :]
        loss = loss_fn(logits.reshape(-1, logits.shape[-1]), tgt_out.reshape(-1))
        loss.backward()
        optimizer.step()
        losses += loss.item()
    return losses / len(dataloader)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume")
    parser.add_argument("--save")
    parser.add_argument("--device", type=torch.device, default=DEVICE)
    args = parser.parse_args()
    torch.manual_seed(0)
    transformer = Seq2SeqTransformer()
    for p in transformer.parameters():
        if p.dim() > 1:
            nn.init.xavier_uniform_(p)
    transformer = transformer.to(args.device)
    loss_fn = nn.CrossEntropyLoss(ignore_index=PAD_IDX)
    optimizer = torch.optim.Adam(transformer.parameters(), lr=1e-4, betas=(0.9, 0.98), eps=1e-9)
    if args.resume:
        checkpoint = torch.load(args.resume, map_location=args.device)
        transformer.load_state_dict(checkpoint["transformer"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    pairs = [(torch.randint(3, SRC_VOCAB, (7, 4)), torch.randint(3, TGT_VOCAB, (6, 4))) for _ in range(2)]
    print(f"loss {train_epoch(transformer, optimizer, loss_fn, pairs, args.device):.4f}")
    if args.save:
        torch.save({"transformer": transformer.state_dict(), "optimizer": optimizer.state_dict()}, args.save)


if __name__ == "__main__":
    main()
